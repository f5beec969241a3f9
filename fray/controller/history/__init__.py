"""Tables of the past in the store, from which no decision is made.

- `tables`: ended attempts and machines that are gone;
- `sums`: sums over attempts, in SQL;
- `capacity`: the capacity by kind and zone, once a minute.

`sums` and `capacity` import `tables`, and not each other.
"""
