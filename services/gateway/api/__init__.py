"""OpenAI's HTTP surface over a `Generator`."""
