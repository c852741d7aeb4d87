-- How jobs go out: which one is next, and under what lease. leases.lua has how they come back unfinished.

local PROMOTE_SLICE, promote_due, stall_config, stall_at, watch, drop_entry, job_of, fail_for_good, sign_for_node, next_job_due
do
  PROMOTE_SLICE = 1000
  local STALL_DEFAULTS = { enabled = true, stallInterval = 30000, maxStalls = 3, gracePeriod = 5000 }
  local MAX_PASSED = 200 -- jobs that a claim passes over because they may not start
  local NODE_LOCK = 30000 -- after this silence a Node worker takes a job for abandoned

  -- -- promoting ----------------------------------------------------------------------------------------------------------

  do
    local PLANNED = { delayed = true, prioritized = true }

    local function promote_one(job)
      leave(job)
      enter_waiting(job)
      tell('promoted', job)
      announce(job.queue, 'promoted', job.id)
    end

    local function earlier(a, b)
      local left, right = run_at(a), run_at(b)
      if left ~= right then return left < right end
      return birth(a) < birth(b)
    end

    -- Jobs whose time has come, in the order of their time. A Node process may have started or ended one before.
    function promote_due(queue)
      local due = {}
      for _, key in ipairs({ ':scheduled', ':hr:delayed' }) do
        for _, id in ipairs(call('ZRANGEBYSCORE', queue.p .. key, '-inf', str(NOW), 'LIMIT', 0, PROMOTE_SLICE)) do
          local job = find(queue, id)
          if job and PLANNED[job.h.state] then due[#due + 1] = job else call('ZREM', queue.p .. key, id) end
        end
      end
      if #due > 1 then table.sort(due, earlier) end
      for _, job in ipairs(due) do promote_one(job) end
    end
  end

  -- -- leases -------------------------------------------------------------------------------------------------------------

  function stall_config(queue)
    return config(queue, 'hrStall') or STALL_DEFAULTS
  end

  -- When silence counts as a stall. A valid lease protects its holder, unless stalls were asked for by name.
  function stall_at(job)
    local set = stall_config(job.queue)
    if not set.enabled then return nil end
    local is_asked = settings(job).stallTimeout or meta(job.queue).hrStall
    if job.h.tok and not is_asked then return nil end
    local silence = settings(job).stallTimeout or set.stallInterval
    return math.max(number(job, 'hb') + math.floor(silence), number(job, 'processedOn') + math.floor(set.gracePeriod))
  end

  -- When an active job must be looked at: end of lease, timeout or stall, whichever is first.
  local function next_look(job)
    local look
    for _, at in ipairs({ job.h.tok and number(job, 'until') or false, tonumber(job.h.tmo) or false, stall_at(job) or false }) do
      if at and (not look or at < look) then look = at end
    end
    return look or number(job, 'hb') + 3600000
  end

  function watch(job)
    local look = next_look(job)
    call('ZADD', job.queue.p .. ':hr:active', str(look), job.id)
    due_at(look)
  end

  -- -- claiming -----------------------------------------------------------------------------------------------------------

  local function read_group(queue, count)
    local stream = queue.k.stream
    local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', count, 'STREAMS', stream, '>')
    if reply and reply.err then
      if not string.find(reply.err, 'NOGROUP', 1, true) then error(reply.err, 0) end
      if call('EXISTS', stream) == 0 then return {} end -- a queue that has had no job must not be left behind
      call('XGROUP', 'CREATE', stream, GROUP, '0')
      call('PERSIST', queue.k.events) -- if the queue was obliterated before, they were to go
      reply = call('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', count, 'STREAMS', stream, '>')
    end
    return reply and reply[1] and reply[1][2] or {}
  end

  -- The oldest entry that nobody has taken: where it stands in time.
  local function stream_head(queue)
    local stream = queue.p .. ':stream'
    local after = '0-0'
    local readers = redis.pcall('XINFO', 'GROUPS', stream)
    if readers.err then return nil end
    for _, group in ipairs(readers) do
      local info = to_map(group)
      if info.name == GROUP then after = info['last-delivered-id'] end
    end
    local entry = call('XRANGE', stream, '(' .. after, '+', 'COUNT', 1)[1]
    if not entry then return nil end
    return entry_place(entry) or place_in_time(tonumber(string.match(entry[1], '^%d+')), string.rep('0', 36))
  end

  function drop_entry(queue, entry)
    call('XACK', queue.k.stream, GROUP, entry[1])
    call('XDEL', queue.k.stream, entry[1])
  end

  function job_of(queue, entry)
    local id = field_of(entry, 'jobId')
    return id and find(queue, id)
  end

  -- These take the job that was found at some place. False: it was removed by somebody who left that behind, or has moved
  -- on since; the place is cleared.

  local function take_entry(queue, entry)
    local job = job_of(queue, entry)
    if not job or job.h.state ~= 'waiting' then
      drop_entry(queue, entry)
      return false
    end
    job.h.entry = entry[1]
    job.source = 's'
    return job
  end

  -- `group`: by whose order it was found.
  local function take_ready(queue, head, group)
    local job = find(queue, string.sub(head, RANK + 1))
    if not job or job.h.state ~= 'waiting' or job.h.rank ~= head then
      call('ZREM', queue.k.ready, head)
      call('ZREM', group_key(queue, group), head)
      return false
    end
    leave_ready(job)
    job.source = 'z'
    return job
  end

  local LISTED = { waiting = true, prioritized = true, delayed = true }

  local function take_listed(queue, id)
    local job = find(queue, id)
    if not job or not LISTED[job.h.state] then return false end
    job.source = 'l'
    return job
  end

  local pop_prioritized
  do
    local FEW, MANY, LANE_MS = 64, 10000, 60000

    -- Members of one score are sorted as text, so the lowest number may stand anywhere among them.
    local function lowest(ids)
      local found, least
      for _, id in ipairs(ids) do
        local n = tonumber(id) or 0
        if not found or n < least then found, least = id, n end
      end
      return found
    end

    -- The order of many by their numbers, noted for as long as they last. Those that come meanwhile have higher ones.
    local function open_lane(lane, ids)
      for i = 1, #ids, 1000 do
        local scored = {}
        for j = i, math.min(i + 999, #ids) do
          scored[#scored + 1] = tonumber(ids[j]) or 0
          scored[#scored + 1] = ids[j]
        end
        call('ZADD', lane, unpack(scored))
      end
      call('PEXPIRE', lane, LANE_MS)
    end

    -- The next one of a lane that still waits with this priority.
    local function take_of_lane(queue, lane, band)
      while true do
        local id = call('ZPOPMIN', lane)[1]
        if not id then return nil end
        local at = tonumber(call('ZSCORE', queue.k.scheduled, id) or '')
        if at and at >= band and at <= band + NOW then return id end
      end
    end

    local function next_of_band(queue, band)
      local lane = lane_key(queue, band / BAND)
      local id = take_of_lane(queue, lane, band)
      if id then return id end
      local due = call('ZRANGEBYSCORE', queue.k.scheduled, str(band), str(band + NOW), 'LIMIT', 0, MANY)
      if #due <= FEW then return lowest(due) end
      open_lane(lane, due)
      return take_of_lane(queue, lane, band)
    end

    -- Jobs that Node producers gave a glide-mq priority: the lowest number first, the oldest within it.
    function pop_prioritized(queue)
      local id = call('RPOP', queue.p .. ':priority')
      local from = BAND
      while not id do
        local head = call('ZRANGEBYSCORE', queue.p .. ':scheduled', str(from), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
        if not head[1] then return nil end
        local band = math.floor(tonumber(head[2]) / BAND) * BAND
        id = next_of_band(queue, band)
        if id then call('ZREM', queue.p .. ':scheduled', id) end
        from = band + BAND
      end
      return id
    end
  end

  -- The next job of a queue in its own order: our priorities above 0, glide-mq's, LIFO, FIFO, then negative ones.
  -- Returns the job, or false when the caller should ask again, or nil when there is none.
  local function next_job(queue)
    local head = call('ZRANGE', queue.k.ready, 0, 0)[1]
    if head and string.sub(head, 1, 8) < '05000000' then return take_ready(queue, head) end
    local id = pop_prioritized(queue)
    if id then return take_listed(queue, id) end
    if head and string.sub(head, 1, 9) == '050000000' then return take_ready(queue, head) end
    id = call('RPOP', queue.k.lifo)
    if id then return take_listed(queue, id) end
    if head then
      local first = stream_head(queue)
      local is_fifo = string.sub(head, 1, 9) == FIFO
      if not first or (is_fifo and string.sub(head, 10, RANK) < first) then return take_ready(queue, head) end
    end
    local entry = read_group(queue, 1)[1]
    return entry and take_entry(queue, entry)
  end

  -- -- groups in turn -----------------------------------------------------------------------------------------------------

  local function take_of_group(queue, group, demand)
    local head = call('ZRANGE', group_key(queue, group), 0, 0)[1]
    if not head then
      call('ZREM', queue.p .. ':hr:turn', group)
      return nil
    end
    if not groups.may_run(queue, group, demand) then return nil end
    return take_ready(queue, head, group)
  end

  local function next_ungrouped(queue)
    local head = call('ZRANGE', group_key(queue, nil), 0, 0)[1]
    local first = stream_head(queue)
    if head and (not first or string.sub(head, 1, 9) < FIFO or (string.sub(head, 1, 9) == FIFO and string.sub(head, 10, RANK) < first)) then
      return take_ready(queue, head)
    end
    local entry = first and read_group(queue, 1)[1]
    return entry and take_entry(queue, entry)
  end

  -- Whose turn it is in this call. There may be very many groups: they are read once, and one that has nothing to give, or
  -- as many jobs at work as it may have, is passed over from then on.
  local function turn_of(queue, demand)
    if not demand.turn then
      demand.turn = { groups = call('ZRANGE', queue.p .. ':hr:turn', 0, -1), passed = 0, idle = groups.at_work(queue, demand) }
    end
    return demand.turn
  end

  -- Ungrouped jobs first, then one job of each group in turn, within the limits of the groups.
  local function next_of_groups(queue, demand)
    if type(demand.affinity) == 'string' then return take_of_group(queue, demand.affinity, demand) end
    local job = next_ungrouped(queue)
    if job ~= nil or demand.isUngrouped then return job end
    local turn = turn_of(queue, demand)
    for _ = 1, #turn.groups do
      local group = turn.groups[turn.passed + 1]
      turn.passed = (turn.passed + 1) % #turn.groups
      if not turn.idle[group] then
        job = take_of_group(queue, group, demand)
        if job ~= nil then return job end
        turn.idle[group] = true
      end
    end
    return nil
  end

  -- Note whose turn is next: those who had theirs go to the end.
  local function note_turn(queue, demand)
    local turn = demand.turn
    if not turn or turn.passed == 0 then return end
    local score = call('HINCRBY', queue.p .. ':hr:count', 'turn', turn.passed) - turn.passed
    for i = 1, turn.passed do call('ZADD', queue.p .. ':hr:turn', 'XX', score + i, turn.groups[i]) end
  end

  -- -- handing out --------------------------------------------------------------------------------------------------------

  expire = function(job)
    if is_ours(job) then
      tell('expired', job)
      announce(job.queue, 'expired', job.id)
      tell_flow(job, 'expired')
      families.child_failed(job, 'expired')
      remove(job)
      return
    end
    job.h.state = job.h.state or 'waiting'
    leave_hole(job)
    leave(job)
    release_ordered_slot(job)
    enter_finished(job, 'failed')
    put(job, 'failedReason', 'expired')
    plan_scheduler(job)
    tell('expired', job)
    announce(job.queue, 'expired', job.id)
  end

  is_expired = function(job)
    local ttl = is_ours(job) and settings(job).ttl
    if ttl then return NOW > number(job, 'timestamp') + ttl end
    local ends = number(job, 'expireAt')
    return ends > 0 and NOW >= ends
  end

  function fail_for_good(job, text)
    tell('failed', job, { error = text, terminal = true })
    note(job, 'failed', { error = text })
    bury_or_remove(job, 'unknown', text)
  end

  local function token_of(demand, nth)
    return nth == 1 and demand.token or demand.token .. ':' .. nth
  end

  local function serial_of(demand, nth)
    return demand.broker .. ':' .. str(demand.serial + nth)
  end

  -- A sign of life that keeps Node workers from taking the job over before its lease ends: they count from there for as
  -- long as its producer said, within their bounds.
  function sign_for_node(job, lease)
    local asked = settings(job).lockDuration
    local lock = asked and asked >= 1000 and asked <= 86400000 and asked or NODE_LOCK
    return str(math.max(NOW, NOW + lease - lock))
  end

  -- Lease one job to who asked.
  local function hand_out(job, demand, nth)
    local queue = job.queue
    if job.source ~= 's' then call('INCR', queue.p .. ':list-active') end
    if job.h.rank then put(job, 'rank', nil) end
    put(job, 'state', 'active')
    put(job, 'entry', job.source == 's' and job.h.entry or nil) -- one from elsewhere may have been in the stream before
    put(job, 'processedOn', str(NOW))
    put(job, 'hb', str(NOW))
    put(job, 'lastActive', sign_for_node(job, demand.lease))
    put(job, 'len', str(demand.lease))
    put(job, 'until', str(NOW + demand.lease))
    if demand.serial or job.h.ser then put(job, 'ser', demand.serial and serial_of(demand, nth)) end
    if demand.owner or job.h.tok then
      put(job, 'own', demand.owner)
      put(job, 'tok', demand.owner and token_of(demand, nth))
    end
    local timeout = settings(job).timeout
    if timeout and timeout > 0 then put(job, 'tmo', str(NOW + math.floor(timeout))) end
    forget_lease(job)
    if job.h.hg then call('HINCRBY', queue.p .. ':hr:groups-active', job.h.hg, 1) end
    if has_history(job) then note(job, 'active', { worker = demand.owner }) end
    watch(job)
    write(job)
    local flat = {}
    for field, value in pairs(job.h) do
      flat[#flat + 1] = field
      flat[#flat + 1] = value
    end
    return flat
  end

  -- Whether a job that was taken may run; else it is gone, parked or failed.
  local function may_start(job)
    if job.h.revoked == '1' then
      groups.step_back(job)
      job.h.state = 'waiting'
      fail_for_good(job, 'revoked')
      return false
    end
    if is_expired(job) then
      groups.step_back(job)
      expire(job)
      return false
    end
    return groups.pass_gates(job, fail_for_good) and true or false
  end

  -- `hand_out` spelled out for what nearly every claim finds: a plain job in the stream. Appends its particulars to
  -- `claims` and returns its id; nil for any other job. The client knows the rest, for it asked for it.
  local function hand_out_plain(queue, entry, demand, nth, claims)
    local id = field_of(entry, 'jobId') or ''
    local key = queue.k.job .. id
    local found = call('HMGET', key, 'hv', 'state', 'entry', 'data', 'timestamp', 'attemptsMade', 'revoked', 'hd')
    if found[1] ~= PLAIN or found[2] ~= 'waiting' or found[3] ~= entry[1] or found[7] then return nil end
    if demand.owner then
      call('HSET', key, 'state', 'active', 'processedOn', NOW_TEXT, 'lastActive', demand.alive, 'ls', demand.times, 'tok', token_of(demand, nth), 'own', demand.owner)
    else
      call('HSET', key, 'state', 'active', 'processedOn', NOW_TEXT, 'lastActive', demand.alive, 'ls', demand.times)
    end
    if demand.serial then call('HSET', key, 'ser', serial_of(demand, nth)) end
    local n = #claims
    claims[n + 1], claims[n + 2], claims[n + 3] = id, field_of(entry, 'name') or '', found[4] or ''
    claims[n + 4], claims[n + 5], claims[n + 6] = found[8] or '', found[5] or '', found[6] or '0'
    return id
  end

  -- Whether there is nothing but the stream, as in most queues most of the time: one question instead of eight.
  local function has_only_stream(queue)
    local k = queue.k
    return call('EXISTS', k.scheduled, k.ready, k.delayed, k.priority, k.lifo, k.ratelimited) == 0
  end

  -- Whether no job that is ready has a place before those in the stream: then one read gets them all.
  local function is_stream_next(queue)
    if call('EXISTS', queue.p .. ':hr:ready', queue.p .. ':priority', queue.p .. ':lifo') > 0 then return false end
    return call('ZCOUNT', queue.p .. ':scheduled', str(BAND), '+inf') == 0
  end

  -- Somebody goes without: when the next delayed job is due, whoever pushed it.
  function next_job_due(queue)
    for _, key in ipairs({ ':scheduled', ':hr:delayed' }) do
      local at = tonumber(call('ZRANGE', queue.p .. key, 0, 0, 'WITHSCORES')[2])
      if at and at < BAND then due_at(at) end
    end
    for _, band in ipairs(bands(queue)) do
      local ahead = { '(' .. str(band + NOW), '(' .. str(band + BAND) }
      local at = tonumber(call('ZRANGEBYSCORE', queue.k.scheduled, ahead[1], ahead[2], 'WITHSCORES', 'LIMIT', 0, 1)[2])
      if at then due_at(at - band) end
    end
  end

  local CLAIM_ARGS = 5 -- fields of the record `Claiming`

  -- What somebody asked for. Without an owner it is the silence that counts and not the lease.
  local function read_demand(args, at, broker)
    local length = tonumber(args[at + 4])
    local owner = args[at + 1] ~= '' and args[at + 1] or nil
    return {
      broker = broker,
      count = tonumber(args[at]),
      owner = owner,
      token = args[at + 2],
      serial = tonumber(args[at + 3]),
      lease = length,
      times = NOW_TEXT .. ' ' .. args[at + 4],
      look = str(NOW + (owner and length or STALL_DEFAULTS.stallInterval)),
      alive = length > NODE_LOCK and str(NOW + length - NODE_LOCK) or NOW_TEXT,
    }
  end

  local function read_demands(args, at, count, broker)
    local demands, total = {}, 0
    for i = 1, count do
      demands[i] = read_demand(args, at + (i - 1) * CLAIM_ARGS, broker)
      total = total + demands[i].count
    end
    return demands, total
  end

  -- Whose turn it is, and which of its jobs comes next: the first who asked gets all it wants before the next gets one.
  local function asker(round)
    while round.nth >= round.demands[round.at].count do round.at, round.nth = round.at + 1, 0 end
    return round.demands[round.at], round.nth + 1
  end

  local function give(round, job)
    if not may_start(job) then return end
    round.claims[#round.claims + 1] = hand_out(job, asker(round))
    round.nth, round.count = round.nth + 1, round.count + 1
  end

  local function give_entry(round, queue, entry)
    local demand, nth = asker(round)
    local id = round.may_be_plain and hand_out_plain(queue, entry, demand, nth, round.claims)
    if id then
      local looks = round.looks
      looks[#looks + 1], looks[#looks + 2] = demand.look, id
      round.nth, round.count = nth, round.count + 1
      return
    end
    local job = take_entry(queue, entry)
    if job then give(round, job) end
  end

  -- Entries may be there for nothing: expired, parked, left behind. Those behind them are looked at, too, so many in a call.
  local function give_from_stream(round, queue, wanted)
    round.may_be_plain, round.looks = not meta(queue).hrStall, {}
    local read = 0
    repeat
      local asked = wanted - round.count
      local entries = read_group(queue, asked)
      for _, entry in ipairs(entries) do give_entry(round, queue, entry) end
      read = read + #entries
      if round.count < wanted and read >= wanted + MAX_PASSED then
        wake(queue) -- who asked is to ask again
        break
      end
    until round.count >= wanted or #entries < asked
    -- The client knows when plain jobs are to be looked at, and looks then.
    if #round.looks > 0 then call('ZADD', queue.k.active, unpack(round.looks)) end
  end

  local function give_in_order(round, queue, wanted, group)
    local looked_at = 0
    while round.count < wanted do
      if looked_at >= wanted + MAX_PASSED then
        wake(queue) -- as above
        return
      end
      looked_at = looked_at + 1
      local job
      if group then job = next_of_groups(queue, group) else job = next_job(queue) end
      if job == nil then return end
      if job then give(round, job) end
    end
  end

  -- Hand out jobs to all who asked, as far as there are any and the limits of the queue allow. Of each job the reply has
  -- its hash or, if it is plain, the particulars that `hand_out_plain` names.
  local function claim_for(queue, demands, total, group)
    local only_stream = has_only_stream(queue)
    if not only_stream then
      promote_due(queue)
      groups.promote_rate_limited(queue)
    end
    if meta(queue).paused == '1' then return {} end
    local wanted, bucket = groups.room(queue, total)
    local round = { demands = demands, claims = {}, count = 0, at = 1, nth = 0 }
    if wanted > 0 and not group and (only_stream or is_stream_next(queue)) then
      give_from_stream(round, queue, wanted)
    else
      give_in_order(round, queue, wanted, group)
      if group then note_turn(queue, group) end
    end
    if bucket and round.count > 0 then
      bucket.tokens = math.max(0, bucket.tokens - round.count)
      groups.save_bucket(queue, bucket)
    end
    if round.count < total and not only_stream then next_job_due(queue) end
    return round.claims
  end

  local function claim(queue, args)
    local demands, total = read_demands(args, 4, 1, args[2])
    return { claim_for(queue, demands, total, args[3] ~= '' and cjson.decode(args[3]) or nil) }
  end

  verb('claim', 'broker group Claiming', claim)

  -- What a busy worker needs in one step: end the jobs it has done, then hand out the next ones.
  local function complete_and_claim(queue, args)
    local count = tonumber(args[3])
    local outcomes = complete_plain(queue, args, 4 + count * CLAIM_ARGS)
    if count == 0 then return { outcomes, {} } end
    local demands, total = read_demands(args, 4, count, args[2])
    return { outcomes, claim_for(queue, demands, total) }
  end

  verb('completeAndClaim', 'broker count Claiming* (size Ending*)*', complete_and_claim)
end
