"""Integrations with Lightning, Accelerate and the Hugging Face Trainer.

Each module imports its framework, so none is imported here. Import the one that you use, such as
`from gradsieve.integrations.lightning import SieveCallback`.
"""
