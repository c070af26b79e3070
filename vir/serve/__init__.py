"""A local page to explore a trained model: its answer, what a patch retains, what each form costs."""
