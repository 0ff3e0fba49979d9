"""The Lightning rim: module, data module, stream, weight publication, monitors."""
