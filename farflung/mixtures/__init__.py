"""Floor 5: mixtures of models, each trained by itself on its own part of the data, and what routes between them."""
