-- Queues that are being emptied in slices (Drain, Obliterate): one event tells of all their jobs when the last slice is done.
-- A row here means that it is not done yet; whoever finds one goes on with it. Else what the first slices took would be
-- gone untold.
CREATE TABLE clearing (
    queue  TEXT    NOT NULL,
    event  INTEGER NOT NULL, -- its code: drained or obliterated
    since  INTEGER NOT NULL, -- the newest event when it began
    last   INTEGER NOT NULL, -- and the newest job (seq)
    spared BLOB    NOT NULL, -- jobs (seq) that were at work then and stay
    PRIMARY KEY (queue, event, since)
) STRICT, WITHOUT ROWID;
