-- Which job is next, and where a job of each state is kept.
--
-- waiting          plain jobs (priority 0, FIFO, no group) in the stream, where Node workers take them too; all others
--                  in hr:ready and, by group, in hr:group:<id>. Members there begin with their rank, which sorts as text.
-- delayed          in scheduled when they will be plain, else in hr:delayed
-- active           in the stream's list of pending entries or counted in list-active; by next look in hr:active
-- waiting-children in hr:blocked
-- completed, failed in the sets of that name

local RANK, FIFO, bands, lane_key, field_of, entry_place, place_in_time, rank, append, group_key, enter_waiting, enter_delayed,
  enter_queued, enter_finished, enter_blocked, release_ordered_slot, leave_hole, leave_ready, leave,
  key_holder, hold_key, living_holder, release_key, has_key_rival, take_keys, forget_ties, remove, withdraw
do
  RANK = 60
  FIFO = '050000001' -- how the rank of a FIFO job of priority 0 begins

  local INVERTED = {
    ['0'] = 'f', ['1'] = 'e', ['2'] = 'd', ['3'] = 'c', ['4'] = 'b', ['5'] = 'a', ['6'] = '9', ['7'] = '8',
    ['8'] = '7', ['9'] = '6', ['a'] = '5', ['b'] = '4', ['c'] = '3', ['d'] = '2', ['e'] = '1', ['f'] = '0',
  }

  -- Where the jobs of each glide-mq priority begin in `scheduled`, the lowest number first.
  function bands(queue)
    local found, from = {}, BAND
    while true do
      local head = call('ZRANGEBYSCORE', queue.k.scheduled, str(from), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
      if not head[1] then return found end
      from = math.floor(tonumber(head[2]) / BAND) * BAND
      found[#found + 1] = from
      from = from + BAND
    end
  end

  -- Where the order of many jobs of one glide-mq priority is noted.
  function lane_key(queue, priority)
    return queue.p .. ':hr:lane:' .. str(priority)
  end

  function field_of(entry, name)
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == name then return fields[i + 1] end
    end
  end

  -- Where an entry of the stream stands in time, nil for one of Node's. `at` of a plain job is without its id.
  function entry_place(entry)
    local at = field_of(entry, 'at')
    return at and #at == 15 and at .. field_of(entry, 'jobId') or at
  end

  function place_in_time(run, born)
    if run == NOW and #NOW_TEXT == 13 then return '00' .. NOW_TEXT .. born end
    return string.format('%015.0f', run) .. born
  end

  function rank(job)
    local head = string.format('%08d', 5000000 - number(job, 'hp'))
    if settings(job).lifo then return head .. '0' .. string.rep('0', 15) .. string.gsub(birth(job), '%x', INVERTED) end
    return head .. '1' .. place_in_time(run_at(job), birth(job))
  end

  local function is_plain_order(job)
    return number(job, 'hp') == 0 and not job.h.hg and not (is_ours(job) and settings(job).lifo)
  end

  -- Whether the job belongs behind everything in the stream.
  local function is_newest(job)
    local last = call('XREVRANGE', job.queue.p .. ':stream', '+', '-', 'COUNT', 1)[1]
    if not last then return true end
    local at = entry_place(last)
    if at then return place_in_time(run_at(job), birth(job)) > at end
    return run_at(job) > tonumber(string.match(last[1], '^%d+'))
  end

  function append(job)
    local at = place_in_time(run_at(job), birth(job))
    put(job, 'entry', call('XADD', job.queue.p .. ':stream', '*', 'jobId', job.id, 'name', job.h.name or '', 'at', at))
  end

  function group_key(queue, group)
    return queue.p .. ':hr:group:' .. (group or '')
  end

  local function join_turn(queue, group)
    local turn = queue.p .. ':hr:turn'
    if group and not call('ZSCORE', turn, group) then call('ZADD', turn, call('HINCRBY', queue.p .. ':hr:count', 'turn', 1), group) end
  end

  -- Jobs of Node producers stay where Node workers look for them, even if that costs them their place.
  local function enter_where_node_looks(job)
    local p, band = job.queue.p, number(job, 'priority')
    if job.h.lifo == '1' then
      call('RPUSH', p .. ':lifo', job.id)
    elseif band > 0 then
      put(job, 'state', 'prioritized')
      call('ZADD', p .. ':scheduled', str(band * BAND), job.id)
      local lane = lane_key(job.queue, band)
      if call('EXISTS', lane) == 1 then call('ZADD', lane, tonumber(job.id) or 0, job.id) end
    else
      append(job)
    end
  end

  -- `is_new`: it was pushed just now and is due now, so nothing in the stream can be younger.
  function enter_waiting(job, is_new)
    local queue = job.queue
    put(job, 'state', 'waiting')
    if is_plain_order(job) and not is_ours(job) then
      enter_where_node_looks(job)
    elseif is_plain_order(job) and (is_new or is_newest(job)) then
      append(job)
    else
      local member = rank(job) .. job.id
      put(job, 'rank', member)
      call('ZADD', queue.p .. ':hr:ready', 0, member)
      call('ZADD', group_key(queue, job.h.hg), 0, member)
      join_turn(queue, job.h.hg)
    end
    wake(queue)
  end

  function enter_delayed(job)
    local queue, due = job.queue, run_at(job)
    put(job, 'state', 'delayed')
    if is_plain_order(job) then
      local band = is_ours(job) and 0 or number(job, 'priority')
      call('ZADD', queue.p .. ':scheduled', str(band * BAND + due), job.id)
    else
      call('ZADD', queue.p .. ':hr:delayed', str(due), job.id)
    end
    due_at(due)
  end

  -- After its time was settled: waiting if that has come, else delayed.
  function enter_queued(job)
    if run_at(job) <= NOW then enter_waiting(job) else enter_delayed(job) end
  end

  function enter_finished(job, state)
    put(job, 'state', state)
    put(job, 'finishedOn', str(NOW))
    call('ZADD', job.queue.p .. ':' .. state, str(NOW), job.id)
  end

  function enter_blocked(job)
    put(job, 'state', 'waiting-children')
    call('SADD', job.queue.p .. ':hr:blocked', job.id)
  end

  local LEASE_FIELDS = { 'tok', 'own', 'until', 'len', 'tmo', 'hb', 'ser', 'src' }

  -- Out of the pending entries or the counter, whichever it came from.
  local function leave_active(job)
    local queue = job.queue
    if job.h.entry then
      call('XACK', queue.p .. ':stream', GROUP, job.h.entry)
      call('XDEL', queue.p .. ':stream', job.h.entry)
      put(job, 'entry', nil)
    elseif tonumber(call('GET', queue.p .. ':list-active') or 0) > 0 then
      call('DECR', queue.p .. ':list-active')
    end
    call('ZREM', queue.p .. ':hr:active', job.id)
    if job.h.hg then
      if call('HINCRBY', queue.p .. ':hr:groups-active', job.h.hg, -1) <= 0 then call('HDEL', queue.p .. ':hr:groups-active', job.h.hg) end
      wake(queue)
    elseif meta(queue).globalConcurrency then
      wake(queue)
    end
    for _, field in ipairs(LEASE_FIELDS) do
      if job.h[field] then put(job, field, nil) end
    end
  end

  function leave_ready(job)
    local queue, group = job.queue, job.h.hg
    call('ZREM', queue.p .. ':hr:ready', job.h.rank)
    call('ZREM', group_key(queue, group), job.h.rank)
    if group and call('EXISTS', group_key(queue, group)) == 0 then call('ZREM', queue.p .. ':hr:turn', group) end
    put(job, 'rank', nil)
  end

  local CLOCKS_APART = 1000
  local MAX_SEARCHED = 50000

  -- The entry of a job among so many of the stream from one on.
  local function find_entry(job, from, most)
    local size = 10
    while from and most > 0 do
      local entries = call('XRANGE', job.queue.k.stream, from, '+', 'COUNT', size)
      for _, entry in ipairs(entries) do
        if field_of(entry, 'jobId') == job.id then return entry[1] end
      end
      from = #entries == size and '(' .. entries[size][1]
      most, size = most - size, math.min(size * 10, 1000)
    end
  end

  -- Node's functions do not note where in the stream they put a job: it has to be searched for. An entry that stayed
  -- there would be carried out by a Node worker, whatever has become of the job. Whoever empties a queue asks for the
  -- first one each time. Others stand where they were added: entries are numbered by time.
  local function drop_unknown_entry(job)
    local added = str(math.max(0, number(job, 'timestamp') + number(job, 'delay') - CLOCKS_APART))
    local entry = find_entry(job, '-', 10) or find_entry(job, added, MAX_SEARCHED) or find_entry(job, '-', MAX_SEARCHED)
    if not entry then return end
    call('XACK', job.queue.k.stream, GROUP, entry)
    call('XDEL', job.queue.k.stream, entry)
  end

  -- Out of the lists or the set of delayed jobs; whether it was there.
  local function leave_lists(job)
    local p = job.queue.p
    for _, list in ipairs({ ':priority', ':lifo' }) do
      if call('LREM', p .. list, 1, job.id) > 0 then return true end
    end
    return call('ZREM', p .. ':scheduled', job.id) > 0
  end

  local function leave_waiting(job)
    local queue, entry = job.queue, job.h.entry
    if job.h.rank then
      leave_ready(job)
      return
    end
    if entry then put(job, 'entry', nil) end
    if entry and call('XDEL', queue.p .. ':stream', entry) > 0 then return end
    if job.source and job.source ~= 's' then return end -- it was taken from its place before
    if not leave_lists(job) then drop_unknown_entry(job) end
  end

  -- Out of the place that its state says; the caller puts it somewhere else or removes it.
  function leave(job)
    local state, p = job.h.state, job.queue.p
    if state == 'active' then
      leave_active(job)
    elseif state == 'waiting' then
      leave_waiting(job)
    elseif state == 'delayed' or state == 'prioritized' then
      if call('ZREM', p .. ':scheduled', job.id) == 0 then call('ZREM', p .. ':hr:delayed', job.id) end
    elseif state == 'waiting-children' then
      call('SREM', p .. ':hr:blocked', job.id)
    elseif state == 'group-waiting' then
      call('ZREM', p .. ':groupq:' .. (job.h.groupKey or job.h.orderingKey or ''), job.id)
      call('SREM', p .. ':hr:parked', job.id)
    else
      call('ZREM', p .. ':' .. state, job.id)
      if state == 'failed' then call('ZREM', p .. ':hr:burials', job.id) end
    end
  end

  -- -- unique keys --------------------------------------------------------------------------------------------------------

  -- Who holds a key: `<expiry or ->:<job id>`.
  function key_holder(queue, key)
    local text = call('HGET', queue.p .. ':hr:keys', key)
    if not text then return nil end
    local expires, id = string.match(text, '^([^:]*):(.*)$')
    return { id = id, expires = tonumber(expires) }
  end

  function hold_key(queue, key, id, expires)
    call('HSET', queue.p .. ':hr:keys', key, (expires and str(expires) or '-') .. ':' .. id)
  end

  -- A Node worker that ends or removes a job does not know of its key: such a job holds nothing any more.
  function living_holder(queue, key)
    local holder = key_holder(queue, key)
    if not holder or (holder.expires and holder.expires <= NOW) then return nil end
    local job = find(queue, holder.id)
    return job and not has_ended(job) and holder or nil
  end

  function release_key(job)
    local key = job.h.uk
    if not key then return false end
    local holder = key_holder(job.queue, key)
    if not holder or holder.id ~= job.id then return false end
    call('HDEL', job.queue.p .. ':hr:keys', key)
    return true
  end

  -- Whether another job holds the key that this one would take back.
  function has_key_rival(job)
    local holder = job.h.uk and living_holder(job.queue, job.h.uk)
    return holder and holder.id ~= job.id or false
  end

  function take_keys(job)
    local queue, key = job.queue, job.h.uk
    if job.h.ci then call('HSET', queue.p .. ':hr:ids', job.h.ci, job.id) end
    if not key then return end
    if has_history(job) then
      history(job).key_released = nil
      history(job).key_expires = nil
    end
    local dedup = links(job).dedup
    local ttl = type(dedup) == 'table' and tonumber(dedup.ttl) or nil
    local expires = ttl and ttl > 0 and NOW + math.floor(ttl) or nil
    if expires then history(job).key_expires = expires end
    hold_key(queue, key, job.id, expires)
  end

  -- -- removing -----------------------------------------------------------------------------------------------------------

  -- `place_ms`: for how long its id is still to lead to its queue.
  function remove(job, place_ms)
    local queue = job.queue
    if not has_ended(job) then plan_scheduler(job) end
    release_key(job)
    leave_hole(job)
    leave(job)
    release_ordered_slot(job)
    if job.h.ci and call('HGET', queue.p .. ':hr:ids', job.h.ci) == job.id then call('HDEL', queue.p .. ':hr:ids', job.h.ci) end
    if job.h.lk then
      call('PEXPIRE', job.h.lk, place_ms or 0)
    elseif job.h.birth then
      call('SADD', queue.p .. ':hr:gone', job.id)
    end
    forget_ties(job)
    call('UNLINK', queue.p .. ':job:' .. job.id, queue.p .. ':log:' .. job.id, queue.p .. ':deps:' .. job.id, queue.p .. ':parents:' .. job.id)
    job.is_gone = true
    JOBS[queue.p .. ' ' .. job.id] = false
  end

  -- Remove a job because somebody says so.
  function withdraw(job)
    tell('removed', job, { prev = word(job) })
    announce(job.queue, 'removed', job.id)
    remove(job)
  end
end
