"""The kernels that attention runs on, one file each. attend.Backend says what a backend provides."""
