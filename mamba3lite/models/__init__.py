"""The model, built cell by cell in `notebooks/`; nothing here is edited by hand."""
