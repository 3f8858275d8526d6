#!/bin/sh
# Counts the prime numbers below a limit in copies of this machine: primes.sh CHILDREN [LIMIT]. Each child takes every CHILDRENth number.
children=${1:?expected the number of children}
limit=${2:-20000}

counts=$(vmove-fork run --count "$children" -- awk -v limit="$limit" '
    BEGIN {
        step = ENVIRON["VMOVE_FORK_SIZE"]
        for (number = ENVIRON["VMOVE_FORK_INDEX"] + 1; number < limit; number += step) {
            prime = 1
            for (divisor = 2; divisor * divisor <= number && prime; divisor++)
                prime = number % divisor != 0
            found += prime
        }
        print found + 0
    }') || exit
echo "$counts" | awk -v limit="$limit" '{ sum += $1 } END { print sum " prime numbers below " limit }'
