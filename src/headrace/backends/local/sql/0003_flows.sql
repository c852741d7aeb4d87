-- Workflows: one row per flow and an append-only log of what happened in it. The bodies are the client's own.

CREATE TABLE flow (
    id       TEXT    PRIMARY KEY,
    workflow TEXT    NOT NULL,
    queue    TEXT    NOT NULL, -- of the jobs that decide how it goes on
    status   TEXT    NOT NULL,
    revision INTEGER NOT NULL CHECK (revision > 0),
    created  INTEGER NOT NULL,
    updated  INTEGER NOT NULL,
    ended    INTEGER           -- NULL while it lives
) STRICT, WITHOUT ROWID;
CREATE INDEX flow_by_end ON flow (ended, id);

CREATE TABLE flow_step (
    flow    TEXT    NOT NULL,
    seq     INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    kind    TEXT    NOT NULL,
    step    TEXT    NOT NULL,
    attempt INTEGER NOT NULL,
    body    BLOB,
    PRIMARY KEY (flow, seq)
) STRICT, WITHOUT ROWID;
