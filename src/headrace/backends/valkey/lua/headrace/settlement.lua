-- How jobs end: complete, fail, retry, bury, and what that means for parents, keys and groups.

local ACK_ARGS, is_held, note_sign_of_life, check_lease, check_token, read_ack, complete_one, end_lease, forget_lease, complete_plain,
  dlq_config, watch_burial, plan_auto_retry, retry, end_attempt, revive_dead_letter
do
  local MAX_FAILURES = 100
  local MAX_MINUTES = 3000 -- fields of a day are 2880
  local MAX_REMEMBERED = 10000
  local DEPARTED_MS = 3600000
  local PLACE_MS = 60000 -- one key per job: not for longer than it takes to connect again
  local MAX_DROPPED = 1000
  local DLQ_DEFAULTS = { autoRetry = false, autoRetryInterval = 3600000, maxAutoRetries = 3, maxAge = 604800000, maxEntries = 10000 }

  local function count_minute(queue, kind, ended, run_ms)
    local key, minute = queue.p .. ':metrics:' .. kind, 'm:' .. str(NOW - NOW % 60000)
    local count = call('HINCRBY', key, minute .. ':c', ended)
    if run_ms and run_ms > 0 then call('HINCRBY', key, minute .. ':d', str(run_ms)) end
    if count > ended or call('HLEN', key) <= MAX_MINUTES then return end -- the first of a minute tidies up
    for _, field in ipairs(call('HKEYS', key)) do
      local at = tonumber(string.match(field, '^m:(%d+):'))
      if at and at < NOW - 86400000 then call('HDEL', key, field) end
    end
  end

  -- -- leases -------------------------------------------------------------------------------------------------------------

  -- Whether the lease of an active job is still what lets it run: a Node worker that takes a silent job over gives it a
  -- new entry in the stream and a new beginning, and leaves the lease as it was.
  function is_held(job)
    local entry = job.h.entry
    if not job.h.hb or number(job, 'hb') < number(job, 'processedOn') then return false end
    if not entry then return true end
    local pending = redis.pcall('XPENDING', job.queue.k.stream, GROUP, entry, entry, 1)
    return not pending.err and #pending > 0
  end

  -- Who holds the job is alive, whatever the clock of the broker says that told of it last.
  function note_sign_of_life(job)
    put(job, 'hb', str(math.max(NOW, number(job, 'hb'))))
    put(job, 'lastActive', str(math.max(NOW, number(job, 'lastActive'))))
  end

  -- Jobs that went with the end of their lease, as `<id> <token>`: for late calls with that token.
  local function departed_key(queue)
    return queue.p .. ':hr:departed'
  end

  function check_token(job, token)
    if job.h.state ~= 'active' or not job.h.tok or job.h.tok == token then return end
    if token == '' then refuse('lease_lost', 'Lock token required for job ' .. job.id) end
    refuse('lease_lost', 'Invalid or expired lock token for job ' .. job.id)
  end

  -- The job if the caller may end its attempt; false if that attempt was finalised before. A lease that merely ran out
  -- still counts for a completion while nobody else has the job.
  function check_lease(queue, id, token, is_late_allowed)
    local job = find(queue, id)
    local unknown = 'Job not found or not in processing state: ' .. id
    if not job then
      if call('ZSCORE', departed_key(queue), id .. ' ' .. token) then return false end
      refuse('not_found', unknown)
    end
    local h = job.h
    if h.state == 'active' and h.revoked == '1' then refuse('lease_lost', 'Job was revoked: ' .. id) end
    if h.state == 'active' and is_held(job) then
      check_token(job, token)
      return job
    end
    if not h.ef or (h.et or h.tok or '') ~= token then refuse('not_found', unknown) end
    local may_end = is_late_allowed and (h.state == 'waiting' or h.state == 'delayed')
    return h.ef == '0' and may_end and job or false
  end

  -- Remember a lease that is over, to answer late calls with its token.
  function end_lease(job, token, is_final)
    put(job, 'et', token or '')
    put(job, 'ef', is_final and '1' or '0')
  end

  function forget_lease(job)
    if job.h.et then put(job, 'et', nil) end
    if job.h.ef then put(job, 'ef', nil) end
  end

  -- -- retention ----------------------------------------------------------------------------------------------------------

  local function remember(key, member)
    call('ZADD', key, NOW_TEXT, member)
    if call('ZCARD', key) > MAX_REMEMBERED then call('ZPOPMIN', key, 100) end
  end

  -- Remove a job with its end, which may be told once more: by whoever lost the reply.
  local function depart(job)
    if not job.h.ef then return remove(job) end
    local key = departed_key(job.queue)
    remember(key, job.id .. ' ' .. job.h.et)
    call('PEXPIRE', key, DEPARTED_MS)
    remove(job, PLACE_MS)
  end

  local function drop(queue, set, ids)
    for _, id in ipairs(ids) do
      local job = find(queue, id)
      if job then remove(job) else call('ZREM', set, id) end
    end
  end

  -- Ended jobs beyond the kept number. Node, or another setting before, may have left very many: later ends drop more.
  local function drop_oldest(queue, kind, kept)
    local set = queue.p .. ':' .. kind
    local over = call('ZCARD', set) - kept
    if over > 0 then drop(queue, set, call('ZRANGE', set, 0, math.min(over, MAX_DROPPED) - 1)) end
  end

  -- What a Node producer asked to keep: a number, or {age, count}.
  local function retain(job, kind, keep)
    local queue = job.queue
    local count, age = tonumber(keep), nil
    if type(keep) == 'table' then count, age = tonumber(keep.count), tonumber(keep.age) end
    local set = queue.p .. ':' .. kind
    if age and age > 0 then drop(queue, set, call('ZRANGEBYSCORE', set, '-inf', str(NOW - age * 1000), 'LIMIT', 0, MAX_DROPPED)) end
    if count and count > 0 then drop_oldest(queue, kind, count) end -- 0 keeps all of them, as in Node
  end

  -- -- completing ---------------------------------------------------------------------------------------------------------

  ACK_ARGS = 6 -- fields of the record `Completion`

  function read_ack(args, at, keys)
    return {
      queue = queue_of_key(keys[tonumber(args[at])]),
      id = args[at + 1],
      token = args[at + 2],
      value = args[at + 3],
      raw = args[at + 4],
      remove = args[at + 5],
    }
  end

  local function should_remove(job, told)
    if told ~= '' then return told == '1' end
    return settings(job).removeOnComplete
  end

  local function succeed(job, plan)
    local ties = {}
    for name, value in pairs(links(job)) do ties[name] = value end
    ties['repeat'] = plan.repeat_
    ties.customId, ties.dependsOn, ties.childrenIds = nil, nil, nil
    local successor = make({
      queue = job.queue,
      id = plan.id,
      name = job.h.name,
      data = job.h.data,
      raw = job.h.hd or '',
      created = str(NOW),
      run = str(plan.run),
      priority = job.h.hp or '0',
      max_attempts = job.h.maxAttempts,
      extra = { opts = job.h.opts, groupId = job.h.hg, uniqueKey = job.h.uk, links = ties },
    })
    put(successor, 'hs', job.h.hs)
    put(job, 'next', successor.id)
    if run_at(successor) > NOW then enter_delayed(successor) else enter_waiting(successor) end
    history(successor).timeline = { { state = successor.h.state, timestamp = NOW } }
    take_keys(successor)
    write(successor)
    announce(job.queue, 'added', successor.id, 'name', successor.h.name)
    tell_pushed(successor, { extra = { size = plan.size } })
  end

  -- A schedule of Node that waits for its job to end (repeatAfterComplete) is planned anew with that end.
  plan_scheduler = function(job)
    local name = job.h.schedulerName
    local text = name and call('HGET', job.queue.p .. ':schedulers', name)
    if not text then return end
    local pause = tonumber(string.match(text, '"repeatAfterComplete":(%d+)'))
    if not pause then return end
    -- The last one is its own: there may be another in the template, which stands before it. 0 says that it waits.
    local planned, count = string.gsub(text, '^(.*"nextRun":)0([,}].*)$', '%1' .. str(NOW + pause) .. '%2')
    if count == 1 then call('HSET', job.queue.p .. ':schedulers', name, planned) end
  end

  function complete_one(job, ack)
    local queue, token, worker = job.queue, job.h.tok, job.h.own
    if job.h.state ~= 'active' then token = ack.token end
    if has_history(job) then note(job, 'completed') end
    release_key(job)
    leave(job)
    release_ordered_slot(job)
    enter_finished(job, 'completed')
    put(job, 'returnvalue', ack.value ~= '' and ack.value or 'null')
    put(job, 'hr', ack.raw ~= '' and ack.raw or nil)
    put(job, 'hn', ack.value == '' and ack.raw == '' and '1' or nil)
    if token and token ~= '' then end_lease(job, token, true) end
    local started = tonumber(job.h.processedOn)
    tell('completed', job, { attempt = number(job, 'attemptsMade') + 1, worker = worker, delay = started and NOW - started or nil })
    announce_completed(queue, job.id, job.h.returnvalue, job.h.hr)
    count_minute(queue, 'completed', 1, started and NOW - started or nil)
    if ack.plan and ack.plan.run then succeed(job, ack.plan) end
    families.child_done(job)
    plan_scheduler(job)
    local keep = should_remove(job, ack.remove)
    if keep == true then
      remember(queue.p .. ':hr:satisfied', job.id)
      depart(job)
    elseif keep then
      write(job)
      retain(job, 'completed', keep)
    end
  end

  -- A completed repeat job pushes its successor: the client computes when, so it is asked once with the links.
  local function needs_successor(acks, jobs)
    local asked = {}
    for i, job in ipairs(jobs) do
      if job and job.h.hl and links(job)['repeat'] and not acks[i].plan and not has_key_rival(job) then
        asked[#asked + 1] = i - 1
      end
    end
    return asked
  end

  -- -- completing plain jobs ----------------------------------------------------------------------------------------------

  local END_ARGS = 3 -- fields of the record `Ending`

  -- Since when the caller holds a plain job, and its entry; nil when it is not plain or not the caller's.
  local function plain_lease(queue, id, token)
    local found = call('HMGET', queue.k.job .. id, 'hv', 'state', 'entry', 'processedOn', 'ls', 'tok', 'revoked')
    local since = found[4]
    if found[1] ~= PLAIN or found[2] ~= 'active' or not since or not found[5] or found[7] then return nil end
    if found[6] and found[6] ~= token then return nil end
    if string.find(found[5], since, 1, true) ~= 1 then return nil end -- somebody else began it anew
    return since, found[3]
  end

  local function end_plain(queue, id, value)
    local key, told = queue.k.job .. id, value == '' and 'null' or value
    -- Its owner and entry mean nothing any more, and there may be very many such jobs.
    if value == '' then
      call('HSET', key, 'state', 'completed', 'finishedOn', NOW_TEXT, 'returnvalue', told, 'ls', '!', 'own', '', 'entry', '', 'hn', '1')
    else
      call('HSET', key, 'state', 'completed', 'finishedOn', NOW_TEXT, 'returnvalue', told, 'ls', '!', 'own', '', 'entry', '')
    end
    announce_completed(queue, id, told)
    if not meta(queue).hrAwaited then return end
    local job = { queue = queue, id = id, h = { hv = PLAIN, returnvalue = told, hn = value == '' and '1' or nil } }
    publish_end({ event = 'completed', queue = queue.name }, job)
  end

  -- What the ends of many plain jobs have in common, in one command each.
  local function close_books(queue, ids, entries, run_ms)
    if #ids == 0 then return end
    local k, scores = queue.k, {}
    for i, id in ipairs(ids) do scores[2 * i - 1], scores[2 * i] = NOW_TEXT, id end
    call('XACK', k.stream, GROUP, unpack(entries))
    call('XDEL', k.stream, unpack(entries))
    call('ZREM', k.active, unpack(ids))
    call('ZADD', k.completed, unpack(scores))
    count_minute(queue, 'completed', #ids, run_ms)
    if meta(queue).globalConcurrency then wake(queue) end
  end

  -- `complete_one` spelled out for what nearly every completion is: `args` from `at` on has lots, each with its size and so
  -- many records `Ending`. Per lot 1, or 0 and nothing done when one of its jobs is not plain, or not the caller's:
  -- `complete` is for those. The client makes the events.
  function complete_plain(queue, args, at)
    local outcomes, ids, entries, run_ms = {}, {}, {}, 0
    while args[at] do
      local first, last, before, run_before = at + 1, at + END_ARGS * tonumber(args[at]), #ids, run_ms
      local is_whole, seen = true, {}
      for i = first, last, END_ARGS do
        local since, entry = plain_lease(queue, args[i], args[i + 1])
        if not since or seen[args[i]] then
          is_whole = false
          break
        end
        seen[args[i]] = true
        ids[#ids + 1], entries[#entries + 1] = args[i], entry
        run_ms = run_ms + math.max(0, NOW - tonumber(since))
      end
      if is_whole then
        for i = first, last, END_ARGS do end_plain(queue, args[i], args[i + 2]) end
      else
        for i = #ids, before + 1, -1 do ids[i], entries[i] = nil, nil end
        run_ms = run_before
      end
      outcomes[#outcomes + 1] = is_whole and 1 or 0
      at = last + 1
    end
    close_books(queue, ids, entries, run_ms)
    return outcomes
  end

  local function read_acks(args, keys)
    local acks = {}
    local plans = args[3] ~= '' and cmsgpack.unpack(args[3]) or {}
    for at = 4, #args - ACK_ARGS + 1, ACK_ARGS do
      local ack = read_ack(args, at, keys)
      ack.plan = plans[ack.id]
      acks[#acks + 1] = ack
    end
    return acks
  end

  -- Apply completions: `all` or none of them, or `each` by itself. Per job: 1 done, 0 ended before, or why it was refused.
  local function complete(_, args, keys)
    local is_each, acks, jobs, seen, problems = args[2] == 'each', read_acks(args, keys), {}, {}, {}
    for i, ack in ipairs(acks) do
      local ok, job = pcall(check_lease, ack.queue, ack.id, ack.token, true)
      if ok and job and seen[job] then
        ok, job = false, { kind = 'not_found', text = 'Job not found or not in processing state: ' .. ack.id }
      end
      if not ok and (not is_each or not job.kind) then error(job, 0) end
      if not ok then problems[i] = job end
      jobs[i] = ok and job or false
      seen[jobs[i]] = true
    end
    local asked = needs_successor(acks, jobs)
    if #asked > 0 then return { 'repeat', asked } end
    local outcomes = {}
    for i, ack in ipairs(acks) do
      if problems[i] then
        outcomes[i] = { problems[i].kind, problems[i].text }
      else
        outcomes[i] = jobs[i] and 1 or 0
        if jobs[i] then complete_one(jobs[i], ack) end
      end
    end
    return { 'done', outcomes }
  end

  verb('complete', 'mode plans Completion*', complete)

  -- -- burying ------------------------------------------------------------------------------------------------------------

  function dlq_config(queue)
    local own = config(queue, 'hrDlq')
    if not own then return DLQ_DEFAULTS end
    if own.maxAge == cjson.null then own.maxAge = nil end
    return own
  end

  function watch_burial(job)
    local burial, due = history(job).burial, nil
    if not burial then return end
    for _, at in ipairs({ burial.next_retry_at or false, burial.expires_at or false }) do
      if at and (not due or at < due) then due = at end
    end
    if due then
      call('ZADD', job.queue.p .. ':hr:burials', str(due), job.id)
      due_at(due)
    else
      call('ZREM', job.queue.p .. ':hr:burials', job.id)
    end
  end

  function plan_auto_retry(burial, set)
    burial.next_retry_at = nil
    if set.autoRetry and burial.retry_count < set.maxAutoRetries then
      burial.next_retry_at = NOW + math.floor(set.autoRetryInterval * 2 ^ math.max(0, burial.retry_count - 1))
    end
  end

  local function bury(job, reason, text)
    local past, set, queue = history(job), dlq_config(job.queue), job.queue
    local previous = past.burial or {}
    past.burial = {
      entered_at = NOW,
      reason = reason,
      error = text,
      retry_count = previous.retry_count or 0,
      last_retry_at = previous.last_retry_at,
      expires_at = set.maxAge and NOW + math.floor(set.maxAge) or nil,
    }
    plan_auto_retry(past.burial, set)
    leave(job)
    release_ordered_slot(job)
    enter_finished(job, 'failed')
    put(job, 'failedReason', text or 'failed')
    watch_burial(job)
    drop_oldest(queue, 'failed', set.maxEntries)
  end

  -- The end without success: parents hear of it, then the job is buried or, if so asked, dropped.
  bury_or_remove = function(job, reason, text, told, is_discarded)
    local queue, started = job.queue, job.h.state == 'active' and tonumber(job.h.processedOn)
    count_minute(queue, 'failed', 1, started and NOW - started or nil)
    if is_discarded then tell_flow_of_removal(job, 'its job was discarded') else tell_flow(job, text or reason) end
    release_key(job)
    local keep = settings(job).removeOnFail
    if told == '1' then keep = true elseif told == '0' then keep = false end
    leave_hole(job)
    announce(queue, 'failed', job.id, 'failedReason', text or 'failed')
    if keep == true then
      plan_scheduler(job)
      families.child_failed(job, text)
      depart(job)
      return
    end
    bury(job, reason, text)
    plan_scheduler(job)
    families.child_failed(job, text)
    if keep then
      write(job)
      retain(job, 'failed', keep)
    end
  end

  -- -- failing ------------------------------------------------------------------------------------------------------------

  local function backoff_ms(job, luck)
    local wanted, attempts = settings(job).backoff, number(job, 'attemptsMade')
    if not is_ours(job) then
      if type(wanted) ~= 'table' then return 0 end
      local delay = wanted.type == 'exponential' and 2 ^ (attempts - 1) * wanted.delay or wanted.delay
      return math.floor(delay + luck * (settings(job).jitter or 0) * delay + 0.5)
    end
    local delay, kind, cap = wanted, 'exponential', 3600000
    if type(wanted) == 'table' then
      delay, kind, cap = wanted.delay, wanted.type, tonumber(wanted.maxDelay) or 3600000
    end
    local raw = kind == 'fixed' and delay * (0.8 + 0.4 * luck) or delay * 2 ^ math.min(attempts, 62) * (0.5 + luck)
    return math.floor(math.min(raw, cap) + 0.5)
  end

  function retry(job, luck, after)
    local wait = after or backoff_ms(job, luck)
    put(job, 'run', str(NOW + wait))
    leave(job)
    enter_queued(job)
    put(job, 'processedOn', nil)
    if not is_ours(job) and string.find(job.h.opts or '', '"fallbacks"', 1, true) then
      put(job, 'fallbackIndex', str(number(job, 'fallbackIndex') + 1)) -- which of them a Node worker takes next
    end
    local attempt = number(job, 'attemptsMade') + 1
    note(job, 'waiting', { attempt = attempt })
    tell('retried', job, { prev = 'failed', attempt = attempt, delay = wait })
    announce(job.queue, 'retrying', job.id, 'failedReason', job.h.failedReason or '', 'attemptsMade', job.h.attemptsMade, 'delay', str(wait))
  end

  local function record_failure(job, reason, text)
    local past, started = history(job), tonumber(job.h.processedOn)
    past.failures = past.failures or {}
    past.failures[#past.failures + 1] = {
      attempt = number(job, 'attemptsMade'),
      started_at = started,
      failed_at = NOW,
      reason = reason,
      error = text,
      duration = started and NOW - started or 0,
    }
    if #past.failures > MAX_FAILURES then table.remove(past.failures, 1) end
    note(job, 'failed', { error = text, attempt = number(job, 'attemptsMade') })
  end

  -- One attempt is over without success: another one after the backoff, or the dead-letter queue.
  function end_attempt(job, text, reason, luck, is_terminal, told, after)
    local token, worker = job.h.tok, job.h.own
    put(job, 'attemptsMade', str(number(job, 'attemptsMade') + 1))
    put(job, 'failedReason', text or '')
    record_failure(job, reason, text)
    is_terminal = is_terminal or number(job, 'attemptsMade') >= settings(job).maxAttempts
    tell('failed', job, { attempt = number(job, 'attemptsMade'), worker = worker, error = text, terminal = is_terminal })
    end_lease(job, token, true)
    if is_terminal then
      bury_or_remove(job, reason == 'explicit_fail' and 'max_attempts_exceeded' or reason, text, told)
    else
      retry(job, luck, after)
    end
  end

  local function fail(queue, args)
    local id, token, text, stack, is_terminal, told, luck = unpack(args, 2, 8)
    local job = check_lease(queue, id, token, false)
    if not job then return { 0 } end
    if stack ~= '' then history(job).stacktrace = cmsgpack.unpack(stack) end
    local reason = args[9] == '1' and text or nil
    end_attempt(job, reason, 'explicit_fail', tonumber(luck), is_terminal == '1', told, tonumber(args[10]))
    return { 1 }
  end

  verb('fail', 'id token error stack isTerminal remove luck hasError retryAfter', fail)

  -- -- coming back --------------------------------------------------------------------------------------------------------

  -- Back to waiting with a clean slate, from completed or failed.
  local function revive(job)
    history(job)
    leave(job)
    for field, value in pairs({ attemptsMade = '0', stalledCount = '0', run = str(NOW) }) do put(job, field, value) end
    for _, field in ipairs({ 'finishedOn', 'processedOn', 'returnvalue', 'hr', 'hn', 'failedReason' }) do put(job, field, nil) end
    forget_lease(job)
    if job.h.groupKey then put(job, 'gslot', '0') end -- given back by whoever ended it
    enter_waiting(job)
    take_keys(job)
    note(job, 'waiting')
  end

  function revive_dead_letter(job)
    if has_key_rival(job) then return false end
    local burial = history(job).burial
    if burial then
      burial.retry_count = burial.retry_count + 1
      burial.last_retry_at = NOW
      burial.next_retry_at = nil
    end
    revive(job)
    tell('dlq-retried', job, { prev = 'failed' })
    return true
  end

  -- `state` and ids: those of the jobs that are still in it come back.
  local function revive_many(queue, args)
    local state, revived = args[2], 0
    for i = 3, #args do
      local job = find(queue, args[i])
      if job and job.h.state == state then
        if state == 'failed' then
          if revive_dead_letter(job) then revived = revived + 1 end
        elseif not has_key_rival(job) then
          if has_history(job) then history(job).progress = nil end
          revive(job)
          tell('waiting', job, { prev = 'completed' })
          revived = revived + 1
        end
      end
    end
    if revived > 0 then announce(queue, 'retried', str(revived)) end
    return { revived }
  end

  verb('revive', 'state id*', revive_many)
end
