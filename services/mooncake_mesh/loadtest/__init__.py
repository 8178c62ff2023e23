"""A load client for OpenAI-compatible servers (``mooncake bench serve``): workloads, streams, what became of them."""
