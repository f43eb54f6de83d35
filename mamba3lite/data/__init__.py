"""From text to token shards: tokenizers, corpora, and their preparation."""


class DataError(ValueError):
    """Data that cannot be used: one line with what was found and what is wanted."""
