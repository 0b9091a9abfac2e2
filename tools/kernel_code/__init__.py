"""Of compiled kernels: how long they take, whether they wait enough, whether they race."""
