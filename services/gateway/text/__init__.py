"""From output token IDs to the text a client may see."""
