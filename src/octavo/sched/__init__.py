"""Policy: which tokens to compute next and who must wait. Pure: no arrays, clock, logs or I/O."""
