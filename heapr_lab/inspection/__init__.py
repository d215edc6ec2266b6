"""Why a pruned model does what it does: passages, attribution, two masks compared."""
