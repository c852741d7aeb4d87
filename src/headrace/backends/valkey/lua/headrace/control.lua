-- What clients do to single jobs and whole queues: cancel, delay, promote, pause, drain, clean, limits, groups.

do
  local function is_queued(job)
    local state = word(job)
    return state == 'waiting' or state == 'delayed'
  end

  local function is_unstarted(job)
    return is_queued(job) or job.h.state == 'waiting-children'
  end

  local function active_job(queue, id)
    local job = get(queue, id)
    if job.h.state ~= 'active' then refuse('refused', 'Job is not active (current state: ' .. word(job) .. ')') end
    return job
  end

  verb('cancel', 'id isForced', function(queue, args)
    local job = get(queue, args[2], 'Job not found or cannot be cancelled')
    if not is_unstarted(job) and not (args[3] == '1' and job.h.state == 'active') then
      refuse('refused', 'Job not found or cannot be cancelled')
    end
    tell_flow_of_removal(job, 'its job was cancelled')
    families.child_removed(job)
    withdraw(job)
  end)

  verb('progress', 'id progress hasMessage message', function(queue, args)
    local job = active_job(queue, args[2])
    local past = history(job)
    past.progress = tonumber(args[3])
    if args[4] == '1' then past.message = args[5] end
    put(job, 'progress', args[3])
    note_sign_of_life(job)
    tell('progress', job, { progress = past.progress, action = past.message })
    announce(queue, 'progress', job.id, 'data', args[3])
  end)

  local function replace_data(job, data, raw)
    put(job, 'data', data)
    put(job, 'hd', raw ~= '' and raw or nil)
  end

  verb('update', 'id data raw size', function(queue, args)
    local job = find(queue, args[2])
    if job and job.h.state == 'completed' then job = job.h.next and find(queue, job.h.next) or nil end
    if not job or has_ended(job) then refuse('refused', 'Job not found or cannot be updated') end
    replace_data(job, args[3], args[4])
    tell('updated', job, { bytes = tonumber(args[5]) })
  end, NEEDS_MEMORY)

  verb('changePriority', 'id priority lifo', function(queue, args)
    local job = get(queue, args[2], 'Job not found or not in queue')
    if not is_queued(job) then refuse('refused', 'Job not found or not in queue') end
    local is_delayed = job.h.state == 'delayed'
    leave(job)
    put(job, 'hp', args[3] ~= '0' and args[3] or nil)
    if args[4] ~= '' then change_setting(job, 'lifo', args[4] == '1') end
    if is_delayed then enter_delayed(job) else enter_waiting(job) end
    announce(queue, 'priority-changed', job.id, 'priority', args[3])
  end)

  local function promote_now(job)
    history(job)
    put(job, 'run', str(NOW))
    leave(job)
    enter_waiting(job)
    note(job, 'waiting')
    tell('promoted', job)
    announce(job.queue, 'promoted', job.id)
  end

  -- Those of the given jobs that are delayed; with one id a job that is not is an error.
  verb('promote', 'mode id*', function(queue, args)
    local promoted = 0
    for i = 3, #args do
      local job = find(queue, args[i])
      if job and job.h.state == 'delayed' then
        promote_now(job)
        promoted = promoted + 1
      elseif args[2] == 'one' then
        refuse(job and 'refused' or 'not_found', 'Job not found or not delayed')
      end
    end
    return { promoted }
  end)

  -- Put a job off. `change` has texts of its own.
  verb('delay', 'mode id delayMs token', function(queue, args)
    local is_change, wait = args[2] == 'change', tonumber(args[4])
    local job = get(queue, args[3], is_change and 'Job not found or cannot change delay' or nil)
    local state = word(job)
    if state ~= 'active' and state ~= 'waiting' and state ~= 'delayed' then
      refuse('refused', is_change and 'Job not found or cannot change delay' or 'Job is not active (current state: ' .. state .. ')')
    end
    check_token(job, args[5])
    local token, was_active = job.h.tok, state == 'active'
    history(job)
    put(job, 'run', str(NOW + math.floor(wait)))
    leave(job)
    enter_queued(job)
    if was_active then
      end_lease(job, token, true)
      put(job, 'processedOn', nil)
    end
    note(job, job.h.state)
    tell('delayed', job, { delay = math.floor(wait) })
    announce(queue, 'delay-changed', job.id, 'delay', args[4])
  end)

  verb('moveToWait', 'id token', function(queue, args)
    local job = get(queue, args[2])
    local state = word(job)
    if state == 'active' then
      check_token(job, args[3])
      tell('released', job, { attempt = number(job, 'attemptsMade') + 1 })
      back_to_waiting(job)
      forget_lease(job)
    elseif state == 'delayed' then
      promote_now(job)
    elseif state ~= 'waiting' and not (state == 'failed' and revive_dead_letter(job)) then
      refuse('refused', "Cannot move job from state '" .. state .. "' to waiting")
    end
  end)

  verb('moveToWaitingChildren', 'id token', function(queue, args)
    local job = get(queue, args[2])
    if job.h.state ~= 'active' then refuse('refused', 'Job is not active') end
    check_token(job, args[3])
    local all, open = families.children_of(job), {}
    families.block(job)
    put(job, 'processedOn', nil)
    for _, child in ipairs(all) do
      if child.h.state ~= 'completed' then
        open[#open + 1] = child
        families.wait_for(job, child)
        families.list(job, 'dependsOn', child.id)
      end
    end
    families.hear_of_failures(open)
    -- Without children yet it waits for the first one to be pushed; with all of them done it may go on.
    if #all > 0 then families.after_drop(job) end
  end)

  verb('discard', 'id token', function(queue, args)
    local job = get(queue, args[2])
    if not is_unstarted(job) and job.h.state ~= 'active' then refuse('not_found', 'Job not found') end
    check_token(job, args[3])
    local token, was_active = job.h.tok, job.h.state == 'active'
    tell('failed', job, { terminal = true, action = 'discard' })
    note(job, 'failed')
    bury_or_remove(job, 'unknown', nil, '0', true)
    if was_active then end_lease(job, token, true) end
  end)

  -- -- families -----------------------------------------------------------------------------------------------------------

  -- keys: meta of the child's queue, meta of the parent's queue
  verb('updateParent', 'childId parentId data raw', function(queue, args, keys)
    local home = queue_of_key(keys[2])
    local child = get(queue, args[2], 'Child job not found: ' .. args[2])
    local parent = get(home, args[3], 'Parent job not found: ' .. args[3])
    if has_ended(parent) then refuse('refused', 'Parent job ' .. parent.id .. ' is not linkable') end
    local known = links(child).parentId
    if known and known ~= 'pending' and known ~= parent.id then
      refuse('refused', 'Child job ' .. child.id .. ' already belongs to parent ' .. known)
    end
    own_links(child).parentId = parent.id
    if args[4] ~= '' or args[5] ~= '' then replace_data(child, args[4], args[5]) end
    families.adopt_child(child, parent)
    families.hear_of_failures({ child })
  end)

  verb('removeChildDependency', 'childId', function(queue, args, keys)
    local child = get(queue, args[2], 'Job not found: ' .. args[2])
    local parent_id = links(child).parentId
    if not parent_id then refuse('refused', 'Job ' .. child.id .. ' has no parent') end
    local parent, removed = find(queue_of_key(keys[2]), parent_id), false
    if parent then
      removed = families.cut_tie(parent, child)
      families.after_drop(parent)
    end
    own_links(child).parentId = nil
    return { removed and 1 or 0 }
  end)

  verb('removeUnprocessedChildren', 'parentId', function(queue, args)
    local parent, unstarted = get(queue, args[2]), {}
    for _, child in ipairs(families.children_of(parent)) do
      if is_unstarted(child) then
        families.cut_tie(parent, child)
        unstarted[#unstarted + 1] = child
      end
    end
    for _, child in ipairs(unstarted) do
      if not child.is_gone and is_unstarted(child) then -- else it failed with another one that it waited for
        families.child_removed(child)
        withdraw(child)
      end
    end
    families.after_drop(parent)
  end)

  -- -- unique keys --------------------------------------------------------------------------------------------------------

  local function take_key_away(job)
    if not release_key(job) then return false end
    history(job).key_released = true
    return true
  end

  verb('removeUniqueKey', 'key', function(queue, args)
    local holder = key_holder(queue, args[2])
    local job = holder and find(queue, holder.id)
    return { job and take_key_away(job) and 1 or 0 }
  end)

  verb('removeJobUniqueKey', 'id', function(queue, args)
    local job = find(queue, args[2])
    return { job and take_key_away(job) and 1 or 0 }
  end)

  verb('uniqueKeyOwner', 'key', function(queue, args)
    local holder = living_holder(queue, args[2])
    return { holder and holder.id or '' }
  end)

  -- -- one queue ----------------------------------------------------------------------------------------------------------

  verb('setPaused', 'paused', function(queue, args)
    local wanted = args[2]
    if (meta(queue).paused or '0') == wanted then return end
    meta(queue).paused = wanted
    call('HSET', queue.p .. ':meta', 'paused', wanted)
    local kind = wanted == '1' and 'paused' or 'resumed'
    tell_queue(kind, queue)
    announce(queue, kind, '0')
    wake(queue)
  end)

  -- Fields of the queue's meta and their values; an empty value removes the field. Buckets begin anew.
  verb('setMeta', '(field value)*', function(queue, args)
    for i = 2, #args - 1, 2 do
      if args[i + 1] == '' then
        call('HDEL', queue.p .. ':meta', args[i])
      else
        call('HSET', queue.p .. ':meta', args[i], args[i + 1])
      end
      if args[i] == 'rateLimitMax' then call('HDEL', queue.p .. ':hr:buckets', '') end
      if args[i] == 'hrLimitUntil' and args[i + 1] ~= '' then due_at(tonumber(args[i + 1])) end
    end
    queue.meta = nil
    wake(queue)
  end)

  -- Until when somebody waits at a broker: for jobs (hrParked) or for the end of one (hrAwaited). A note that is over goes
  -- when nobody has a later one: it may be all there is of a queue. Whether other programs have been at the queue, which
  -- then has to be looked after.
  verb('announceWaiting', 'field untilMs', function(queue, args)
    local known, ends = tonumber(meta(queue)[args[2]] or '') or 0, tonumber(args[3])
    if ends > known then
      call('HSET', queue.k.meta, args[2], args[3])
    elseif known <= NOW then
      call('HDEL', queue.k.meta, args[2])
    end
    return { call('EXISTS', queue.p .. ':id', queue.p .. ':schedulers') }
  end)

  -- After hrStall or hrDlq changed: active jobs are looked at anew, dead letters planned anew.
  verb('setStalls', 'config', function(queue, args)
    call('HSET', queue.p .. ':meta', 'hrStall', args[2])
    queue.meta = nil
    for _, id in ipairs(call('ZRANGE', queue.k.active, 0, -1)) do
      local job = find(queue, id)
      if job and job.h.hb then watch(job) end
    end
  end)

  verb('setDeadLetters', 'config', function(queue, args)
    call('HSET', queue.p .. ':meta', 'hrDlq', args[2])
    queue.meta = nil
    local set = dlq_config(queue)
    for _, id in ipairs(call('ZRANGE', queue.p .. ':failed', 0, -1)) do
      local job = find(queue, id)
      local burial = job and job.h.hh and history(job).burial
      if burial then
        burial.expires_at = set.maxAge and burial.entered_at + set.maxAge or nil
        plan_auto_retry(burial, set)
        watch_burial(job)
      end
    end
  end)

  verb('limits', '', function(queue)
    local m = meta(queue)
    local bucket = groups.queue_bucket(queue)
    local ttl = -2
    if bucket then
      local ends = tonumber(m.hrLimitUntil)
      ttl = ends and math.max(0, ends - NOW) or groups.bucket_wait(bucket) or 0
    end
    local concurrency = m.hrHold and 0 or tonumber(m.globalConcurrency)
    return { bucket and m.rateLimitMax or '', bucket and m.rateLimitDuration or '', bucket and m.hrLimitUntil or '', str(ttl), concurrency and str(concurrency) or '', concurrency and groups.active_count(queue) >= concurrency and 1 or 0 }
  end)

  -- Remove the given jobs while they are in one of the given states (comma list, or `any`); ids of those removed.
  -- `why` is for workflows that wait for their end. Jobs that are not told of have no events; who waits for them hears
  -- of it all the same.
  verb('remove', 'states isTold why id*', function(queue, args)
    local states, is_told, removed = args[2], args[3] == '1', {}
    for i = 5, #args do
      local job = find(queue, args[i])
      if job and (states == 'any' or string.find(',' .. states .. ',', ',' .. word(job) .. ',', 1, true)) then
        if is_told then
          tell('removed', job, { prev = word(job) })
        else
          publish_end({ event = 'removed', queue = queue.name }, job)
        end
        if not has_ended(job) then tell_flow_of_removal(job, args[4]) end
        families.child_removed(job)
        remove(job)
        removed[#removed + 1] = job.id
      end
    end
    return { removed }
  end)

  -- The end of a drain or clean: `drained` or `cleaned`, and how many went.
  verb('announce', 'event count', function(queue, args)
    announce(queue, args[2], args[3])
    if args[2] == 'drained' then tell_queue('drained', queue, { bytes = tonumber(args[3]) }) end
  end)

  local PLACES = { 'lifo', 'priority', 'scheduled', 'completed', 'failed', 'hr:ready', 'hr:delayed', 'hr:active', 'hr:blocked' }
  local TRACES = { 'id', 'stream', 'dedup', 'ordering', 'ratelimited', 'list-active', 'hr:burials', 'hr:keys', 'hr:ids', 'hr:gone', 'hr:turn', 'hr:count', 'hr:groups-active', 'hr:satisfied', 'hr:departed', 'hr:parked', 'hr:group:' }
  local SETTINGS = { 'meta', 'rate', 'metrics:completed', 'metrics:failed', 'hr:group-config', 'hr:held', 'hr:buckets' }

  local EVENTS_OUTLIVE = 3600000

  local function unlink_all(queue, names)
    local keys = {}
    for i, name in ipairs(names) do keys[i] = queue.p .. ':' .. name end
    return call('UNLINK', unpack(keys))
  end

  local function has_jobs(queue)
    for _, name in ipairs(PLACES) do
      if call('EXISTS', queue.p .. ':' .. name) == 1 then return true end
    end
    for _, key in ipairs(call('HKEYS', queue.p .. ':ordering')) do
      if call('EXISTS', queue.p .. ':groupq:' .. key) == 1 then return true end
    end
    return call('XLEN', queue.k.stream) > 0
  end

  -- Forget all settings but who waits: brokers that announced it would not do so again.
  local function unlink_settings(queue)
    local waiting = {}
    for _, field in ipairs({ 'hrParked', 'hrAwaited', 'hrWatched' }) do
      local ends = meta(queue)[field]
      if ends and tonumber(ends) > NOW then
        waiting[#waiting + 1] = field
        waiting[#waiting + 1] = ends
      end
    end
    unlink_all(queue, SETTINGS)
    if #waiting > 0 then call('HSET', queue.p .. ':meta', unpack(waiting)) end
    queue.meta = nil
  end

  -- The end of an obliteration, when `count` jobs were removed. Jobs that came meanwhile stay, in a queue without
  -- settings; whether there are none.
  verb('obliterate', 'count', function(queue, args)
    announce(queue, 'obliterated', args[2])
    tell_queue('obliterated', queue, { bytes = tonumber(args[2]) })
    unlink_settings(queue)
    if has_jobs(queue) then return { 0 } end
    for _, key in ipairs(call('HKEYS', queue.p .. ':ordering')) do
      call('UNLINK', queue.p .. ':group:' .. key, queue.p .. ':groupq:' .. key) -- sequences begin anew
    end
    unlink_all(queue, PLACES)
    unlink_all(queue, TRACES)
    call('PEXPIRE', queue.k.events, EVENTS_OUTLIVE) -- who follows the stream reads of the end
    return { 1 }
  end)

  -- -- groups -------------------------------------------------------------------------------------------------------------

  -- Change one setting of a group: `concurrency`, `paused`, or `max` with `duration`. Whether it was set before.
  verb('setGroup', 'group (setting value)*', function(queue, args)
    local group, set = args[2], groups.config(queue, args[2])
    local had = set[args[3]] ~= nil
    for i = 3, #args - 1, 2 do
      local value = args[i + 1]
      if value == '' then set[args[i]] = nil elseif args[i] == 'paused' then set.paused = true else set[args[i]] = tonumber(value) end
    end
    if next(set) == nil then
      call('HDEL', queue.p .. ':hr:group-config', group)
    else
      call('HSET', queue.p .. ':hr:group-config', group, cjson.encode(set))
    end
    wake(queue)
    return { had and 1 or 0 }
  end)

  verb('holdGroup', 'group durationMs', function(queue, args)
    groups.hold(queue, args[2], NOW + math.floor(tonumber(args[3])))
  end)

  verb('groupWait', 'group', function(queue, args)
    local set, wait = groups.config(queue, args[2]), groups.held_until(queue, args[2]) - NOW
    local text = call('HGET', queue.p .. ':hr:buckets', 'group ' .. args[2])
    if text then
      local max, duration = string.match(text, '^%S+ %S+ (%S+) (%S+)$')
      wait = math.max(wait, groups.bucket_wait(groups.read_bucket(queue, 'group ' .. args[2], tonumber(max), tonumber(duration))) or 0)
    end
    return { str(wait > 0 and wait or -2) }
  end)

  -- -- counts -------------------------------------------------------------------------------------------------------------

  local function count_jobs(queue)
    local p, in_stream = queue.p, groups.active_in_stream(queue)
    local prioritized = call('ZLEXCOUNT', p .. ':hr:ready', '-', '(05000000')
    local listed = 0 -- those without a time: the others of a priority are delayed
    for _, band in ipairs(bands(queue)) do listed = listed + call('ZCOUNT', p .. ':scheduled', str(band), str(band)) end
    return {
      call('XLEN', p .. ':stream') - in_stream + call('LLEN', p .. ':lifo') + call('LLEN', p .. ':priority') + call('ZCARD', p .. ':hr:ready') + listed + groups.parked_count(queue),
      call('ZCARD', p .. ':scheduled') - listed + call('ZCARD', p .. ':hr:delayed'),
      in_stream + (tonumber(call('GET', p .. ':list-active')) or 0),
      call('ZCARD', p .. ':completed'),
      call('ZCARD', p .. ':failed'),
      call('SCARD', p .. ':hr:blocked'),
      prioritized + listed,
      meta(queue).paused == '1' and 1 or 0,
      meta(queue).hrHold and 0 or tonumber(meta(queue).globalConcurrency) or -1,
    }
  end

  verb('counts', '', function(queue)
    promote_due(queue)
    flush()
    return { count_jobs(queue) }
  end)

  -- Everything that the slow round wants of a queue, since most have nothing to do: `sweep`, `reclaim` up to its first
  -- cursor, the schedules that Node wrote, `counts`.
  verb('lookAfter', 'luck idleMs maxStalls', function(queue, args)
    local gone = sweep(queue, tonumber(args[2]))
    local cursor = reclaim(queue, args[3], tonumber(args[4]), '0-0')
    flush()
    return { gone, cursor, call('HGETALL', queue.p .. ':schedulers'), count_jobs(queue) }
  end)

  verb('sketch', 'id*', function(queue, args)
    local found = {}
    for i = 2, #args do
      found[i - 1] = call('HMGET', queue.k.job .. args[i], 'state', 'timestamp', 'finishedOn', 'hp', 'hg', 'birth')
    end
    return { found }
  end)

  verb('log', 'id line', function(queue, args)
    local key, keep = queue.p .. ':log:' .. args[2], tonumber(settings(get(queue, args[2])).keepLogs) or 100
    call('RPUSH', key, args[3])
    call('LTRIM', key, -math.max(1, math.min(keep, 100)), -1)
    if keep == 0 then call('UNLINK', key) end
  end, NEEDS_MEMORY)

  -- Another value for the field of a hash that belongs to no queue, if it still has the one that the caller saw.
  redis.register_function({
    function_name = 'headrace' .. GENERATION .. '_replaceField',
    flags = { 'allow-oom' },
    callback = function(keys, args)
      if redis.call('HGET', keys[1], args[1]) ~= args[2] then return 0 end
      redis.call('HSET', keys[1], args[1], args[3])
      return 1
    end,
  })

  redis.register_function({
    function_name = 'headrace_version',
    flags = { 'no-writes' },
    callback = function()
      return VERSION
    end,
  })

  -- Which of the commands that functions use the caller may not use on a key, which is also the name of a channel.
  redis.register_function({
    function_name = 'headrace_forbidden',
    flags = { 'no-writes' },
    callback = function(_, args)
      local refused = {}
      for _, words in ipairs(COMMANDS) do
        local command, second = unpack(words)
        local is_allowed
        if second then is_allowed = redis.acl_check_cmd(command, second, args[1]) else is_allowed = redis.acl_check_cmd(command, args[1]) end
        if not is_allowed then refused[#refused + 1] = command end
      end
      return refused
    end,
  })
end
