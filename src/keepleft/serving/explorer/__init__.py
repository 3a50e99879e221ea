"""What a page, a notebook or a file asks of a model to show how it works: questions in, plain JSON out."""
