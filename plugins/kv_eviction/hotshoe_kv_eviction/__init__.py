"""Built-in kv_eviction."""
