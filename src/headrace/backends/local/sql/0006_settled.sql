-- Children that completed while their parent waits for others: a row here instead of the row of the parent once more, which
-- names all of them. It counts until the row of the parent is written again.
CREATE TABLE settled (
    parent INTEGER NOT NULL, -- seq
    child  TEXT    NOT NULL, -- id
    PRIMARY KEY (parent, child)
) STRICT, WITHOUT ROWID;
