"""Floor 5: mixtures of language models, each trained by itself on its own part of a text, and routers between them."""
