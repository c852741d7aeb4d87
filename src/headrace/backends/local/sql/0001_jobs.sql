-- The durable image of the queues. Memory is authoritative while the server runs; this is what a restart reads.
-- Rules: integer rowids in push order and no secondary index on job (ids are looked up in memory; an index would
-- double the cost of a push). A claim is not written, so an active job stands here as it was before: waiting.
-- Checks avoid IN: SQLite builds a set for it in every statement, which would cost a push as much as its row.
-- To change a table: add the next numbered file; never edit one that was released.

CREATE TABLE job (
    seq      INTEGER PRIMARY KEY,
    id       TEXT    NOT NULL,
    queue    TEXT    NOT NULL,
    state    INTEGER NOT NULL CHECK (state BETWEEN 1 AND 6 AND state <> 3), -- 1 waiting 2 delayed 4 completed 5 failed 6 waiting-children
    priority INTEGER NOT NULL CHECK (priority BETWEEN -1000000 AND 1000000),
    created  INTEGER NOT NULL,
    run_at   INTEGER NOT NULL,
    finished INTEGER,
    attempts INTEGER NOT NULL CHECK (attempts >= 0),
    stalls   INTEGER NOT NULL CHECK (stalls >= 0),
    name     TEXT,
    data     BLOB,    -- MessagePack as it came; NULL: in payload, because it is large
    settings BLOB,    -- NULL: the defaults
    links    BLOB,    -- NULL: none
    history  BLOB,    -- NULL: nothing out of the ordinary
    result   BLOB,
    CHECK ((state = 4 OR state = 5) = (finished IS NOT NULL))
) STRICT;

-- Large payloads live apart, so that a change of state does not rewrite them.
CREATE TABLE payload (
    seq  INTEGER PRIMARY KEY,
    data BLOB NOT NULL
) STRICT;

-- A long PUSHB is written in slices; until its last one its rows (first <= seq <= last) are no jobs yet, and a restart
-- drops them: a batch is stored as a whole or not at all.
CREATE TABLE batch (
    first INTEGER PRIMARY KEY,
    last  INTEGER NOT NULL
) STRICT;

CREATE TABLE log (
    entry   INTEGER PRIMARY KEY,
    job     INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    level   TEXT    NOT NULL CHECK (level IN ('info', 'warn', 'error')),
    message TEXT    NOT NULL
) STRICT;
CREATE INDEX log_of_job ON log (job, entry);

-- Queue settings, schedules and webhooks: few, small, encoded whole.
CREATE TABLE record (
    kind  TEXT NOT NULL CHECK (kind IN ('queue', 'cron', 'webhook')),
    key   TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;

-- One row: where the event log stood at the last commit, and the lifetime counters.
CREATE TABLE mark (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    last_seq INTEGER NOT NULL,
    epoch    INTEGER NOT NULL,
    totals   BLOB    NOT NULL
) STRICT;
