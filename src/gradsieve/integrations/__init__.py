"""Front ends: what Lightning, Accelerate and the Hugging Face Trainer need beside `attach`.

Each module imports its framework, so none is imported here: ask for the one you use, such as
`from gradsieve.integrations.lightning import SieveCallback`.
"""
