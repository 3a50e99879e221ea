"""Many users at once, and a page that shows what the model looks at."""
