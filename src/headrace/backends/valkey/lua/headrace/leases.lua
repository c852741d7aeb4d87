-- How jobs come back unfinished: given back, not renewed in time, timed out or left behind by a dead worker; and what else
-- time does to a queue.

local back_to_waiting, sweep, reclaim
do
  -- -- giving back --------------------------------------------------------------------------------------------------------

  -- In front of what came after it, with no attempt counted.
  function back_to_waiting(job)
    leave(job)
    put(job, 'processedOn', nil)
    enter_waiting(job)
  end

  local function give_back(job)
    tell('released', job, { attempt = number(job, 'attemptsMade') + 1, worker = job.h.own })
    back_to_waiting(job)
    forget_lease(job)
  end

  local function release(queue, args)
    for i = 2, #args - 1, 2 do
      local job = find(queue, args[i])
      if job and job.h.state == 'active' and (job.h.ser == args[i + 1] or job.h.tok == args[i + 1]) then give_back(job) end
    end
  end

  verb('release', '(id lease)*', release)

  -- Give back what is leased to `owner` now, but for the ids in `keep`. One call, so that a claim that the same owner
  -- sends right behind it is not taken for an old one.
  local function release_leases(queue, args)
    local owner, keep, released = args[2], {}, {}
    for i = 3, #args do keep[args[i]] = true end
    for _, id in ipairs(call('ZRANGE', queue.p .. ':hr:active', 0, -1)) do
      if not keep[id] and call('HGET', queue.k.job .. id, 'own') == owner then
        local job = find(queue, id)
        if job.h.state == 'active' then
          give_back(job)
          released[#released + 1] = id
        end
      end
    end
    return { #released }
  end

  verb('releaseLeases', 'owner id*', release_leases)

  -- Give back what claims handed out whose answers were lost: nobody knows that he holds it. They go by their tokens, of
  -- which all but the first have `:<nth>` behind them, and by their serials.
  local function release_lost(queue, args)
    local lost = {}
    for i = 2, #args do lost[args[i]] = true end
    for _, id in ipairs(call('ZRANGE', queue.k.active, 0, -1)) do
      local lease = call('HMGET', queue.k.job .. id, 'tok', 'ser')
      if lost[lease[2]] or (lease[1] and lost[string.match(lease[1], '^[^:]*')]) then
        local job = find(queue, id)
        if job.h.state == 'active' then give_back(job) end
      end
    end
  end

  verb('releaseLost', 'lease*', release_lost)

  -- Renew leases or note heartbeats: per job its id, token, duration (or empty) and 1 to renew without a token.
  local function extend(queue, args)
    local renewed = {}
    for i = 2, #args - 3, 4 do
      local job, token, duration = find(queue, args[i]), args[i + 1], tonumber(args[i + 2])
      local is_ok = job and job.h.state == 'active' and is_held(job) and (token == '' or job.h.tok == token)
      if is_ok and job.h.revoked == '1' then
        fail_for_good(job, 'revoked') -- who holds it learns it from this answer
        is_ok = false
      end
      renewed[#renewed + 1] = is_ok and 1 or 0
      if is_ok then
        note_sign_of_life(job)
        if token ~= '' or args[i + 3] == '1' then
          if duration then put(job, 'len', str(math.floor(duration))) end
          put(job, 'until', str(NOW + number(job, 'len')))
          put(job, 'lastActive', sign_for_node(job, number(job, 'len')))
        end
        watch(job)
      end
    end
    return { renewed }
  end

  verb('extend', 'Renewal*', extend)

  -- -- what time does -----------------------------------------------------------------------------------------------------

  local function tell_stall(job, is_last)
    local attempt = number(job, 'attemptsMade') + 1
    tell('stalled', job, { stalls = number(job, 'stalledCount'), attempt = attempt, worker = job.h.own, action = is_last and 'dlq' or 'retry' })
    announce(job.queue, 'stalled', job.id)
  end

  -- The holder did not renew in time: hand the job to somebody else, without backoff.
  local function expire_lease(job)
    put(job, 'stalledCount', str(number(job, 'stalledCount') + 1))
    local attempts, token = number(job, 'attemptsMade') + 1, job.h.tok
    local is_last = attempts >= settings(job).maxAttempts
    tell_stall(job, is_last)
    if is_last then
      end_attempt(job, 'Lock expired at max attempts (' .. attempts .. ')', 'stalled', 0, true)
      return
    end
    put(job, 'attemptsMade', str(attempts))
    note(job, 'waiting', { error = 'lock expired', attempt = attempts + 1 })
    back_to_waiting(job)
    end_lease(job, token, false)
  end

  local function stall(job, luck)
    put(job, 'stalledCount', str(number(job, 'stalledCount') + 1))
    local stalls, attempts = number(job, 'stalledCount'), number(job, 'attemptsMade') + 1
    local is_hopeless = stalls >= stall_config(job.queue).maxStalls
    local is_last = attempts >= settings(job).maxAttempts
    tell_stall(job, is_hopeless or is_last)
    if is_hopeless then
      end_attempt(job, 'Job stalled ' .. stalls .. ' times', 'stalled', luck, true)
    elseif is_last then
      end_attempt(job, 'Job stalled at max attempts (' .. attempts .. ')', 'max_attempts_exceeded', luck, true)
    else
      end_attempt(job, 'stalled', 'stalled', luck)
    end
  end

  local function look_at(job, luck)
    local stalls_at = stall_at(job)
    if job.h.tmo and number(job, 'tmo') <= NOW then
      end_attempt(job, 'Job timeout exceeded', 'timeout', luck)
    elseif job.h.tok and number(job, 'until') <= NOW then
      expire_lease(job)
    elseif stalls_at and stalls_at <= NOW then
      stall(job, luck)
    else
      watch(job)
    end
  end

  local function tend_active(queue, luck)
    for _, id in ipairs(call('ZRANGEBYSCORE', queue.p .. ':hr:active', '-inf', str(NOW), 'LIMIT', 0, PROMOTE_SLICE)) do
      local job = find(queue, id)
      if job and job.h.state == 'active' and is_held(job) then look_at(job, luck) else call('ZREM', queue.p .. ':hr:active', id) end
    end
  end

  local function tend_dead_letters(queue)
    for _, id in ipairs(call('ZRANGEBYSCORE', queue.p .. ':hr:burials', '-inf', str(NOW), 'LIMIT', 0, PROMOTE_SLICE)) do
      local job = find(queue, id)
      local burial = job and job.h.state == 'failed' and job.h.hh and history(job).burial
      if not burial then
        call('ZREM', queue.p .. ':hr:burials', id)
      elseif burial.expires_at and burial.expires_at <= NOW then
        tell('removed', job, { prev = 'failed' })
        remove(job)
      elseif burial.next_retry_at and burial.next_retry_at <= NOW then
        if not revive_dead_letter(job) then
          burial.next_retry_at = NOW + math.floor(dlq_config(queue).autoRetryInterval)
          watch_burial(job)
        end
      else
        watch_burial(job)
      end
    end
  end

  local function expire_rate_limit(queue)
    local ends = tonumber(meta(queue).hrLimitUntil)
    if not ends then return end
    if ends > NOW then
      due_at(ends)
      return
    end
    call('HDEL', queue.p .. ':meta', 'rateLimitMax', 'rateLimitDuration', 'hrLimitUntil')
    call('HDEL', queue.p .. ':hr:buckets', '')
    wake(queue)
  end

  -- The earliest moment at which the queue needs a sweep.
  local function next_due(queue)
    next_job_due(queue)
    for _, key in ipairs({ ':hr:active', ':hr:burials', ':ratelimited' }) do
      due_at(tonumber(call('ZRANGE', queue.p .. key, 0, 0, 'WITHSCORES')[2]))
    end
  end

  -- Do what time demands of one queue; the ids whose lookup keys may go.
  function sweep(queue, luck)
    expire_rate_limit(queue)
    local k, p = queue.k, queue.p
    if call('EXISTS', k.scheduled, k.delayed, k.active, k.ratelimited, p .. ':hr:burials') > 0 then
      promote_due(queue)
      groups.promote_rate_limited(queue)
      tend_active(queue, luck)
      tend_dead_letters(queue)
      flush()
      next_due(queue)
    end
    return call('SRANDMEMBER', queue.p .. ':hr:gone', 1000)
  end

  verb('sweep', 'luck', function(queue, args)
    return { sweep(queue, tonumber(args[2])) }
  end)

  -- Whether the entry is one that somebody took to work on its job.
  local function is_taken(job)
    return job and (job.h.state == 'active' or (job.h.state == 'waiting' and not job.h.rank))
  end

  -- Whether the entry was taken under a lease that still holds: `sweep` looks after those.
  local function is_leased(job, entry)
    return job.h.state == 'active' and job.h.entry == entry[1] and is_held(job)
  end

  local function take_back(job, entry, most)
    put(job, 'entry', entry[1])
    put(job, 'stalledCount', str(number(job, 'stalledCount') + 1))
    job.h.state = 'active'
    if number(job, 'stalledCount') > most then
      tell_stall(job, true)
      fail_for_good(job, 'job stalled more than maxStalledCount')
    else
      tell_stall(job, false)
      put(job, 'lastActive', nil)
      back_to_waiting(job)
    end
  end

  -- Jobs that somebody else (a Node worker) took and gave no sign of life: through the stream's pending entries, following
  -- the cursor.
  function reclaim(queue, idle, most, cursor)
    local reply = redis.pcall('XAUTOCLAIM', queue.p .. ':stream', GROUP, CONSUMER, idle, cursor, 'COUNT', 100)
    if reply.err then return '0-0' end
    for _, entry in ipairs(reply[2]) do
      local job = job_of(queue, entry)
      if not is_taken(job) then
        drop_entry(queue, entry)
      elseif is_leased(job, entry) then
        if not call('ZSCORE', queue.k.active, job.id) then watch(job) end -- the call that leased it broke off
      elseif NOW - number(job, 'lastActive') >= (settings(job).lockDuration or tonumber(idle)) then
        take_back(job, entry, most)
      end
    end
    return reply[1]
  end

  verb('reclaim', 'idleMs maxStalls cursor', function(queue, args)
    return { reclaim(queue, args[2], tonumber(args[3]), args[4]) }
  end)
end
