"""Claims and behaviour: does a model look where it says it looks?"""
