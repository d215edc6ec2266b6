"""Pruned checkpoints in engines that load plug-ins: vLLM."""
