"""Random, overlapping faults on one service for as long as one wants: ``make soak``.

A seed decides which fault comes when, to whom, and for how long (:mod:`.schedule`). It comes
(:mod:`.faults`) while a service publishes, handles, retries, archives, mirrors and replays
(:mod:`.soaking`). What happened is read from ledgers and from the broker and the database at the
end, and checked by code that shares nothing with the package (:mod:`.history`).
"""
