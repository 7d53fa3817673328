"""The connectors' name before they became a distribution of their own; kept for one release. Use `semkv_vllm`."""
