"""onboard: writes a model's NVIDIA NeMo AutoModel support and proves it equal to Hugging Face transformers."""

__version__ = "0.1.0"
