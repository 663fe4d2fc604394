"""Questions to a job, answered from the state that it has committed: by keys, or by functions over the state of many."""
