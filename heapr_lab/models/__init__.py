"""Everything that knows transformers: loading, identity, experts, hooks, likelihood."""
