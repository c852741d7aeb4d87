-- Neighbours that completed in one tick without a result: one row here instead of a change of each row in job, which
-- stays as it was pushed. It speaks for the rows in first..last that have no history: a job that runs again after it
-- has completed gets one. Ordered by the last, so that what is deleted from the front takes its completions along.
CREATE TABLE completion (
    last     INTEGER PRIMARY KEY,
    first    INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    CHECK (first <= last)
) STRICT;
