"""keepleft demo and keepleft compare: the toy corpus, its translator and the masking experiment."""
