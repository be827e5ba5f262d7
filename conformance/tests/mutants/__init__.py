"""The zoo: small engines with one planted bug each, of kinds that real projects shipped.

To add one: subclass an engine of `mutants.bases` in the module of its family, and decorate it with a `Mutant`, which
names the check that must fail.
"""
