"""The cache behind frameworks that have an interface for one: LangChain, LiteLLM, LlamaIndex.

Each module imports its framework, which nothing here installs.
"""
