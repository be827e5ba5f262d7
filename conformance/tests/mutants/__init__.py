"""The zoo: small engines with one planted bug each, of kinds that real projects shipped.

To add one: subclass an engine of `mutants.bases` in the module of its family, and put a `Mutant` with the
check that must fail into that module's ``MUTANTS``.
"""
