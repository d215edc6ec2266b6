"""Files on disk: written atomically, checked when read, cached by their inputs."""
