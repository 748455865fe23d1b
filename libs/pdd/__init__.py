"""PDD: one language model served from two clusters joined by an ordinary wide-area network."""
