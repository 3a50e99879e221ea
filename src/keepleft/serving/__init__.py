"""Many users at once: requests in, streams of tokens out; and a page that shows what the model looks at."""
