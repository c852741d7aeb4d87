-- A tick that pushes or completes a single plain job notes in that row what others note in the table mark, as one blob
-- that begins with the number of the last event: one page is written instead of two. The newest of all marks counts.
-- Whatever deletes or replaces rows writes the table, so none of them can take the newest mark along.
ALTER TABLE job ADD COLUMN mark BLOB;
