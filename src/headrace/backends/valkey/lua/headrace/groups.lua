-- Limits: token buckets, the groups of the bunqueue protocol, and the ordering groups of glide-mq.

local groups = {}
do
  local DUST = 1e-9

  -- Drop two entries of a hash, picked by chance, if they are over: it would grow for ever with groups that are gone.
  local function tidy(key, is_over)
    local some = call('HRANDFIELD', key, 2, 'WITHVALUES')
    for i = 1, #some, 2 do
      if is_over(some[i + 1]) then call('HDEL', key, some[i]) end
    end
  end

  -- From when on a bucket refills that was last used at `stamp`: by the clock of a broker that is ahead of ours, perhaps.
  -- Set back to our time it would refill once more for each time that both take turns. A clock that is further ahead
  -- than it takes to fill the bucket is wrong.
  local function refills_from(stamp, full_ms)
    return stamp - NOW <= full_ms and math.max(NOW, stamp) or NOW
  end

  -- A bucket is `<tokens> <stamp> <max> <duration>` in hr:buckets; another limit begins with a full one.
  function groups.read_bucket(queue, name, max, duration)
    local text = call('HGET', queue.p .. ':hr:buckets', name)
    local tokens, stamp, old_max, old_duration
    if text then tokens, stamp, old_max, old_duration = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$') end
    local bucket = { name = name, max = max, duration = duration, tokens = max, stamp = NOW }
    if tokens and tonumber(old_max) == max and tonumber(old_duration) == duration then
      local passed = math.max(0, NOW - tonumber(stamp))
      bucket.tokens = math.min(max, tonumber(tokens) + passed * max / duration)
      bucket.stamp = refills_from(tonumber(stamp), duration)
      if bucket.stamp < tonumber(stamp) then groups.save_bucket(queue, bucket) end -- or it stays empty until then
    end
    return bucket
  end

  -- Whether nothing is left to remember of it: that much time fills every bucket.
  local function is_full(text)
    local stamp, duration = string.match(text, '^%S+ (%S+) %S+ (%S+)$')
    return not stamp or NOW - tonumber(stamp) >= tonumber(duration)
  end

  function groups.save_bucket(queue, bucket)
    local text = string.format('%.9f %.0f %.14g %.14g', bucket.tokens, bucket.stamp, bucket.max, bucket.duration)
    call('HSET', queue.p .. ':hr:buckets', bucket.name, text)
    if bucket.name ~= '' then tidy(queue.p .. ':hr:buckets', is_full) end
  end

  -- ms until the next token; nil when there will be none.
  function groups.bucket_wait(bucket)
    local missing = 1 - bucket.tokens
    if missing <= DUST then return 0 end
    if bucket.max < 1 or bucket.duration <= 0 then return nil end
    return bucket.stamp - NOW + math.ceil((missing - DUST) / (bucket.max / bucket.duration))
  end

  function groups.queue_bucket(queue)
    local m = meta(queue)
    local max, duration, ends = tonumber(m.rateLimitMax), tonumber(m.rateLimitDuration), tonumber(m.hrLimitUntil)
    if not max or not duration or (ends and ends <= NOW) then return nil end
    return groups.read_bucket(queue, '', max, duration)
  end

  -- How many jobs at work are in the stream; the others are counted.
  function groups.active_in_stream(queue)
    local done, pending = pcall(call, 'XPENDING', queue.p .. ':stream', GROUP)
    return done and type(pending) == 'table' and tonumber(pending[1]) or 0
  end

  function groups.active_count(queue)
    return groups.active_in_stream(queue) + (tonumber(call('GET', queue.p .. ':list-active')) or 0)
  end

  -- How many jobs the limits of the queue let out now, its bucket, and when to try again.
  function groups.room(queue, wanted)
    if meta(queue).hrHold then return 0, nil end
    local concurrency = tonumber(meta(queue).globalConcurrency)
    if concurrency and concurrency > 0 then wanted = math.min(wanted, concurrency - groups.active_count(queue)) end
    local bucket = groups.queue_bucket(queue)
    if not bucket then return wanted, nil end
    wanted = math.min(wanted, math.floor(bucket.tokens + DUST))
    if wanted <= 0 then
      local wait = groups.bucket_wait(bucket)
      if wait then due_at(NOW + math.max(1, wait)) end
    end
    return wanted, bucket
  end

  -- -- groups of the bunqueue protocol ------------------------------------------------------------------------------------

  function groups.config(queue, group)
    local text = call('HGET', queue.p .. ':hr:group-config', group)
    return text and cjson.decode(text) or {}
  end

  function groups.held_until(queue, group)
    return tonumber(call('HGET', queue.p .. ':hr:held', group)) or 0
  end

  local function is_past(ends)
    return tonumber(ends) <= NOW
  end

  function groups.hold(queue, group, ends)
    call('HSET', queue.p .. ':hr:held', group, str(ends))
    tidy(queue.p .. ':hr:held', is_past)
    due_at(ends)
  end

  -- The groups that have as many jobs at work as they may have.
  function groups.at_work(queue, demand)
    local busy, sets = {}, to_map(call('HGETALL', queue.p .. ':hr:group-config'))
    for group, count in pairs(to_map(call('HGETALL', queue.p .. ':hr:groups-active'))) do
      local most = sets[group] and cjson.decode(sets[group]).concurrency or demand.concurrency
      if most and tonumber(count) >= most then busy[group] = true end
    end
    return busy
  end

  -- Whether a job of the group may run now; takes a token of its rate.
  function groups.may_run(queue, group, demand)
    local set = groups.config(queue, group)
    if set.paused then return false end
    local held = groups.held_until(queue, group)
    if held > NOW then
      due_at(held)
      return false
    end
    local concurrency = set.concurrency or demand.concurrency
    if concurrency and (tonumber(call('HGET', queue.p .. ':hr:groups-active', group)) or 0) >= concurrency then return false end
    local max, duration = set.max or demand.limitMax, set.duration or demand.limitDuration
    if not max or not duration then return true end
    local bucket = groups.read_bucket(queue, 'group ' .. group, max, duration)
    if bucket.tokens + DUST < 1 then
      local wait = groups.bucket_wait(bucket)
      if wait then due_at(NOW + math.max(1, wait)) end
      return false
    end
    bucket.tokens = math.max(0, bucket.tokens - 1)
    groups.save_bucket(queue, bucket)
    return true
  end

  -- -- ordering groups of glide-mq ----------------------------------------------------------------------------------------

  local function ordering(job)
    local key = job.h.groupKey or job.h.orderingKey
    return key and key ~= '' and key or nil
  end

  local function ordered_group(queue, key)
    local name = queue.p .. ':group:' .. key
    local g = to_map(call('HGETALL', name))
    g.key = name
    return g
  end

  -- Whether one of the slots is the job's. Node does not note that: a job whose turn is over was started, and keeps its
  -- slot until it ends. Here `gslot` is 1 while the job has one, and 0 after it was given back.
  local function holds_slot(job, g)
    if job.h.gslot then return job.h.gslot == '1' end
    return number(job, 'orderingSeq') < (tonumber(g.nextSeq) or 1)
  end

  -- Sequence numbers whose jobs are gone are passed over.
  local function skip_holes(g)
    local seq = tonumber(g.nextSeq) or 1
    while g['skip:' .. seq] do
      call('HDEL', g.key, 'skip:' .. seq)
      g['skip:' .. seq] = nil
      seq = seq + 1
    end
    if tostring(seq) ~= g.nextSeq then
      g.nextSeq = str(seq)
      call('HSET', g.key, 'nextSeq', g.nextSeq)
    end
    return seq
  end

  local function refill(g)
    local capacity, rate = tonumber(g.tbCapacity) or 0, tonumber(g.tbRefillRate) or 0
    if capacity <= 0 then return nil end
    local tokens, remainder, stamp = tonumber(g.tbTokens) or capacity, tonumber(g.tbRefillRemainder) or 0, NOW
    if rate > 0 then
      local last, full_ms = tonumber(g.tbLastRefill) or NOW, math.ceil(capacity * 1000 / rate)
      local passed = math.min(math.max(0, NOW - last), full_ms)
      stamp = refills_from(last, full_ms)
      local raw = passed * rate + remainder
      tokens, remainder = tokens + math.floor(raw / 1000), raw % 1000
    end
    if tokens >= capacity then tokens, remainder = capacity, 0 end
    return { capacity = capacity, rate = rate, tokens = tokens, remainder = remainder, stamp = stamp }
  end

  local function window_wait(g)
    local max, duration = tonumber(g.rateMax) or 0, tonumber(g.rateDuration) or 0
    if max <= 0 or duration <= 0 then return 0 end
    local ends = (tonumber(g.rateWindowStart) or 0) + duration
    if NOW >= ends or (tonumber(g.rateCount) or 0) < max then return 0 end
    return ends - NOW
  end

  local function cost_of(job)
    local cost = number(job, 'cost')
    return cost > 0 and cost or 1000
  end

  -- ms to wait for tokens and window, 0 when both allow; `false` when the cost can never be met.
  local function limits_wait(g, cost)
    local bucket = refill(g)
    local wait = window_wait(g)
    if bucket then
      if cost > bucket.capacity then return false, bucket end
      if bucket.tokens < cost then
        local tokens_wait = bucket.rate > 0 and math.ceil((cost - bucket.tokens) * 1000 / bucket.rate) or 86400000
        wait = math.max(wait, bucket.stamp - NOW + tokens_wait)
      end
    end
    return wait, bucket
  end

  -- An entry that was read stands among the pending ones; leaving `waiting` does not take it from there.
  function groups.step_back(job)
    if job.source == 's' then call('XACK', job.queue.p .. ':stream', GROUP, job.h.entry) end
  end

  local function park(job, wait)
    local queue, key = job.queue, ordering(job)
    groups.step_back(job)
    leave(job)
    put(job, 'state', 'group-waiting')
    call('ZADD', queue.p .. ':groupq:' .. key, number(job, 'orderingSeq'), job.id)
    call('SADD', queue.p .. ':hr:parked', job.id)
    if wait and wait > 0 then
      call('ZADD', queue.p .. ':ratelimited', str(NOW + wait), key)
      due_at(NOW + wait)
    end
  end

  -- Let parked jobs of the group back into the stream, as many as its limits allow. One that was started before needs
  -- neither a turn nor a slot.
  local function promote_group(queue, key, g)
    local parked = queue.p .. ':groupq:' .. key
    local first = skip_holes(g)
    local expected = first
    local free = math.max(1, tonumber(g.maxConcurrency) or 1) - (tonumber(g.active) or 0)
    local external = tonumber(call('ZSCORE', queue.p .. ':ratelimited', key) or '') or 0
    while true do
      local head = call('ZRANGE', parked, 0, 0, 'WITHSCORES')
      if not head[1] then return end
      local job = find(queue, head[1])
      if not job or job.h.state ~= 'group-waiting' then
        call('ZREM', parked, head[1])
      else
        local is_returning = tonumber(head[2]) < first
        if not is_returning and (tonumber(head[2]) > expected or free <= 0) then return end
        local wait = limits_wait(g, cost_of(job))
        if external > NOW or (wait and wait > 0) then
          if external <= NOW then call('ZADD', queue.p .. ':ratelimited', str(NOW + wait), key) end
          due_at(math.max(external, NOW + (wait or 0)))
          return
        end
        leave(job)
        put(job, 'state', 'waiting')
        append(job)
        wake(queue)
        if not is_returning then expected, free = expected + 1, free - 1 end
      end
    end
  end

  -- The slot of an ordered job is free again.
  release_ordered_slot = function(job)
    local key = ordering(job)
    if not key or has_ended(job) then return end
    local g = ordered_group(job.queue, key)
    if not holds_slot(job, g) then return end
    put(job, 'gslot', '0')
    g.active = str(math.max(0, (tonumber(g.active) or 0) - 1))
    call('HSET', g.key, 'active', g.active)
    promote_group(job.queue, key, g)
  end

  -- The job is gone before it ran: its place in the order must not hold up those behind it.
  leave_hole = function(job)
    local key, state = ordering(job), job.h.state
    if not key or state == 'active' or state == 'completed' or state == 'failed' then return end
    local g = ordered_group(job.queue, key)
    local seq = number(job, 'orderingSeq')
    if seq < (tonumber(g.nextSeq) or 1) then return end
    put(job, 'gslot', '0') -- its turn is over, and it never had one
    call('HSET', g.key, 'skip:' .. str(seq), '1')
    g['skip:' .. str(seq)] = '1'
    promote_group(job.queue, key, g)
  end

  -- Whether an ordered job may become active now; else it is parked (or failed) and nil.
  function groups.pass_gates(job, fail_for_good)
    local key = ordering(job)
    if not key then return true end
    local queue, g = job.queue, ordered_group(job.queue, key)
    local seq, expected = number(job, 'orderingSeq'), skip_holes(g)
    local is_returning = seq < expected
    if not is_returning and (seq > expected or (tonumber(g.active) or 0) >= math.max(1, tonumber(g.maxConcurrency) or 1)) then
      park(job)
      promote_group(queue, key, g) -- holes that Node left may have kept one parked whose turn it is
      return nil
    end
    local external = tonumber(call('ZSCORE', queue.p .. ':ratelimited', key) or '') or 0
    local wait, bucket = limits_wait(g, cost_of(job))
    if wait == false then
      groups.step_back(job)
      fail_for_good(job, 'cost exceeds token bucket capacity')
      return nil
    end
    if external > NOW then wait = math.max(wait, external - NOW) end
    if wait > 0 then
      park(job, wait)
      return nil
    end
    local set = { 'active', str((tonumber(g.active) or 0) + (holds_slot(job, g) and 0 or 1)) }
    if not is_returning then set[#set + 1], set[#set + 2] = 'nextSeq', str(seq + 1) end
    if bucket then
      for _, pair in ipairs({ { 'tbTokens', str(bucket.tokens - cost_of(job)) }, { 'tbLastRefill', str(bucket.stamp) }, { 'tbRefillRemainder', str(bucket.remainder) } }) do
        set[#set + 1], set[#set + 2] = pair[1], pair[2]
      end
    end
    if (tonumber(g.rateMax) or 0) > 0 then
      local is_over = NOW >= (tonumber(g.rateWindowStart) or 0) + (tonumber(g.rateDuration) or 0)
      set[#set + 1], set[#set + 2] = 'rateCount', is_over and '1' or str((tonumber(g.rateCount) or 0) + 1)
      if is_over then set[#set + 1], set[#set + 2] = 'rateWindowStart', str(NOW) end
    end
    call('HSET', g.key, unpack(set))
    put(job, 'gslot', '1')
    return true
  end

  local MAX_COUNTED_KEYS = 1000

  -- How many jobs wait for their turn. What Node parked is found by the ordering keys only: with very many of these it is
  -- not counted.
  function groups.parked_count(queue)
    local ordering_keys, count = queue.p .. ':ordering', 0
    if call('HLEN', ordering_keys) > MAX_COUNTED_KEYS then return call('SCARD', queue.p .. ':hr:parked') end
    for _, key in ipairs(call('HKEYS', ordering_keys)) do count = count + call('ZCARD', queue.p .. ':groupq:' .. key) end
    return count
  end

  function groups.promote_rate_limited(queue)
    local due = call('ZRANGEBYSCORE', queue.p .. ':ratelimited', '-inf', str(NOW), 'LIMIT', 0, 100)
    for _, key in ipairs(due) do
      call('ZREM', queue.p .. ':ratelimited', key)
      promote_group(queue, key, ordered_group(queue, key))
    end
  end
end
