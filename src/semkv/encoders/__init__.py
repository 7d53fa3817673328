"""Encoders of text and images, and the hooks that fill the embedding layers."""
