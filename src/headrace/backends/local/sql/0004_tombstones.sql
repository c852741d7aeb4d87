-- Custom ids that pushes with `idTtl` have used: for that time they are not used again, even when their job is long gone.
-- Written only for such pushes. Expired rows go a few at a time, which is what the index is for.

CREATE TABLE tombstone (
    queue   TEXT    NOT NULL,
    id      TEXT    NOT NULL,
    job     TEXT    NOT NULL, -- the id of the job that was pushed
    expires INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX tombstone_by_expiry ON tombstone (expires);
