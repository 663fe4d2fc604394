"""Record batches from clients: validation, and the thread that appends them."""
