"""A first look: the same small model trained with dense and with sparse exchange on local workers."""
