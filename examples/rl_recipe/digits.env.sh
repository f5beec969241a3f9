# Runs before digits.yaml is read; what it exports is in the environment of all processes of the run.
export DIGITS_OUTPUT="${DIGITS_OUTPUT:-$PWD/out}"
export DIGITS_MAX_TOKENS=4
