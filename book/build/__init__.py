"""What makes the pages: generated parts, the preprocessor, the glossary, formulas, and the checks of the built book."""
