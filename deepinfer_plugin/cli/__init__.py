"""The commands of ``python -m deepinfer_plugin``; each module adds its parser and runs its command."""
