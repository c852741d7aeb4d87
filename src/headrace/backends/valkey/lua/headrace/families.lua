-- Who waits for whom: hr:pending:<id> is what a job waits for, hr:dependents:<id> lists those who wait for it, both as
-- `<queue prefix> <job id>`. Families may span queues (not in a cluster, where the client refuses them), and be large:
-- the end of a child must not cost as much as there are others.

local families = {}
local bury_or_remove -- see settlement.lua
do
  local function dependents_key(job_or_queue, id)
    return job_or_queue.p .. ':hr:dependents:' .. id
  end

  local function pending_key(job)
    return job.queue.p .. ':hr:pending:' .. job.id
  end

  local function member(job)
    return job.queue.p .. ' ' .. job.id
  end

  local function by_member(text)
    local prefix, id = string.match(text, '^(%S+) (.*)$')
    return prefix and find(queue_at(prefix), id) or nil
  end

  local function waiting_for(job)
    if not job.h.dep then return {} end
    return call('LRANGE', dependents_key(job.queue, job.id), 0, -1)
  end

  local function remove_value(list, value)
    for i, one in ipairs(list or {}) do
      if one == value then
        table.remove(list, i)
        return true
      end
    end
    return false
  end

  -- A new job whose id others wait for already: an earlier job of that id is gone.
  function families.stand_in(job)
    if call('EXISTS', dependents_key(job.queue, job.id)) == 1 then put(job, 'dep', '1') end
  end

  function families.is_awaited(job)
    for _, text in ipairs(waiting_for(job)) do
      local parent = by_member(text)
      if parent and parent.h.state == 'waiting-children' then return true end
    end
    return false
  end

  -- Add an id to a list of the links of a job, if it is not there.
  function families.list(job, name, id)
    local ties = own_links(job)
    local listed = job.listed and job.listed[name]
    if not listed then
      listed, ties[name] = {}, ties[name] or {}
      for _, one in ipairs(ties[name]) do listed[one] = true end
      job.listed = job.listed or {}
      job.listed[name] = listed
    end
    if listed[id] then return false end
    listed[id], ties[name][#ties[name] + 1] = true, id
    return true
  end

  function families.wait_for(job, target)
    if call('SADD', pending_key(job), member(target)) == 0 then return end
    call('RPUSH', dependents_key(target.queue, target.id), member(job))
    put(target, 'dep', '1')
  end

  local function drop_dependency(parent, text)
    call('SREM', pending_key(parent), text)
    local prefix, id = string.match(text, '^(%S+) (.*)$')
    call('LREM', dependents_key(queue_at(prefix), id), 0, member(parent))
  end

  function families.wait_for_nothing(job)
    for _, text in ipairs(call('SMEMBERS', pending_key(job))) do drop_dependency(job, text) end
  end

  forget_ties = function(job)
    if job.h.hh then families.wait_for_nothing(job) end -- who waited has a history
  end

  -- Nothing is left to wait for: the job waits for a worker, or for its time.
  function families.unblock(job, is_quiet)
    leave(job)
    enter_queued(job)
    note(job, word(job))
    if is_quiet then return end
    tell('waiting', job, { prev = 'waiting-children' })
    announce(job.queue, 'active', job.id)
  end

  function families.after_drop(parent)
    if parent.h.state == 'waiting-children' and call('EXISTS', pending_key(parent)) == 0 then families.unblock(parent) end
  end

  -- glide-mq's own book about a parent, so that Node sees the same family.
  local function count_child(parent, child)
    local p = parent.queue.p
    local done = child.queue.p .. ':' .. child.id
    if call('SISMEMBER', p .. ':deps:' .. parent.id, done) == 0 then return nil end
    if parent.h['depdone:' .. done] == nil then
      put(parent, 'depdone:' .. done, '1')
      put(parent, 'depsCompleted', str(number(parent, 'depsCompleted') + 1))
    end
    return call('SCARD', p .. ':deps:' .. parent.id) - number(parent, 'depsCompleted')
  end

  -- In a cluster a parent may be out of reach: the end of the child counts all the same.
  local function find_in_reach(prefix, id)
    local home = queue_at(prefix)
    if type(redis.pcall('EXISTS', home.k.job .. id)) == 'table' then return nil end
    return find(home, id)
  end

  -- The parents of a child in flows of glide-mq: the one that it was added for, and those that a graph has besides.
  local function flow_parents(child)
    local parents = {}
    if is_ours(child) then return parents end
    local id, queue = child.h.parentId, child.h.parentQueue
    if id and queue then
      -- The protocol's text calls it a prefix, Node writes a name: both are understood.
      local prefix = string.find(queue, '{', 1, true) and queue or child.queue.root .. ':{' .. queue .. '}'
      parents[1] = find_in_reach(prefix, id)
    end
    for _, other in ipairs(call('SMEMBERS', child.queue.p .. ':parents:' .. child.id)) do
      local prefix, other_id = string.match(other, '^(.*}):(.*)$')
      parents[#parents + 1] = prefix and find_in_reach(prefix, other_id)
    end
    return parents
  end

  -- A parent that a flow of glide-mq made: its last child is done, so its own delay and priority count.
  local function unblock_flow_parent(parent)
    leave(parent)
    local delay, priority = number(parent, 'delay'), number(parent, 'priority')
    if delay > 0 then
      put(parent, 'run', str(NOW + delay))
      enter_delayed(parent)
    elseif priority > 0 then
      put(parent, 'state', 'prioritized')
      call('ZADD', parent.queue.p .. ':scheduled', str(priority * BAND), parent.id)
      wake(parent.queue)
    else
      enter_waiting(parent)
    end
    announce(parent.queue, 'active', parent.id)
    tell('waiting', parent, { prev = 'waiting-children' })
  end

  local function settle_child_of(parent, child)
    local left = count_child(parent, child)
    if left and left <= 0 and parent.h.state == 'waiting-children' then unblock_flow_parent(parent) end
  end

  function families.child_done(job)
    for _, parent in ipairs(flow_parents(job)) do settle_child_of(parent, job) end
    local waiting = waiting_for(job)
    if #waiting == 0 then return end
    call('UNLINK', dependents_key(job.queue, job.id))
    for _, text in ipairs(waiting) do
      local parent = by_member(text)
      if parent and call('SREM', pending_key(parent), member(job)) == 1 then
        local past = history(parent)
        past.children_completed = (past.children_completed or 0) + 1
        families.after_drop(parent)
      end
    end
  end

  -- -- failures of children -----------------------------------------------------------------------------------------------

  local function fail_parent(parent, text)
    if parent.h.state ~= 'waiting-children' then return end
    tell('failed', parent, { error = text, terminal = true })
    note(parent, 'failed', { error = text })
    bury_or_remove(parent, 'unknown', text)
  end

  -- The policy of a child in a flow of glide-mq, which stands in its options.
  local function apply_flow_policy(parent, child, text)
    local policy = settings(child)
    if parent.h.state ~= 'waiting-children' then return end
    if policy.failParentOnFailure then
      fail_parent(parent, 'Child job ' .. child.id .. ' failed: ' .. text)
    elseif policy.continueParentOnFailure then
      unblock_flow_parent(parent)
    elseif policy.ignoreDependencyOnFailure or policy.removeDependencyOnFailure then
      settle_child_of(parent, child)
    end
  end

  -- Apply the child's failure policy to everything that waits for it. Without one they stay blocked.
  local function apply_policy(child, text)
    local policy = settings(child)
    for _, parent in ipairs(flow_parents(child)) do apply_flow_policy(parent, child, text) end
    local key = child.queue.name .. ':' .. child.id
    for _, waiting in ipairs(waiting_for(child)) do
      local parent = by_member(waiting)
      if parent then
        local past = history(parent)
        if policy.failParentOnFailure then
          drop_dependency(parent, member(child))
          fail_parent(parent, 'Child job ' .. child.id .. ' failed: ' .. text)
        elseif policy.continueParentOnFailure then
          past.failed_children = past.failed_children or {}
          past.failed_children[key] = text
          families.wait_for_nothing(parent)
          families.after_drop(parent)
        elseif policy.ignoreDependencyOnFailure then
          past.ignored_children = past.ignored_children or {}
          past.ignored_children[key] = text
          drop_dependency(parent, member(child))
          families.after_drop(parent)
        elseif policy.removeDependencyOnFailure then
          drop_dependency(parent, member(child))
          families.after_drop(parent)
        end
      end
    end
  end

  -- A parent that fails for its child is news for its own parents; chains are long, so this is a list and no recursion.
  function families.child_failed(job, text)
    if BAD_NEWS then
      BAD_NEWS[#BAD_NEWS + 1] = { job, text }
      return
    end
    BAD_NEWS = { { job, text } }
    local i = 1
    while BAD_NEWS[i] do
      apply_policy(BAD_NEWS[i][1], BAD_NEWS[i][2] or 'failed')
      i = i + 1
    end
    BAD_NEWS = nil
  end

  -- Who takes a job away that has not ended calls this before: to those who wait for it that is a failure.
  function families.child_removed(job)
    if not has_ended(job) then families.child_failed(job, 'removed') end
  end

  -- Children may have failed for good before anybody waited for them: their policy counts all the same.
  function families.hear_of_failures(targets)
    for _, target in ipairs(targets) do
      if not target.is_gone and target.h.state == 'failed' then families.child_failed(target, failed_reason(target)) end
    end
  end

  -- Out of its place until others are done: `wait_for` says which.
  function families.block(job)
    history(job)
    families.wait_for_nothing(job)
    leave(job)
    enter_blocked(job)
    note(job, 'waiting-children')
    tell('waiting-children', job)
    announce(job.queue, 'waiting-children', job.id)
  end

  -- A parent that has not begun waits for the child, unless the child waits for it.
  function families.adopt_child(child, parent)
    families.list(parent, 'childrenIds', child.id)
    if child.queue ~= parent.queue then homes(parent, true)[child.id] = child.queue.p end
    if parent.h.state == 'active' or has_ended(parent) or child.h.state == 'completed' then return end
    if call('SISMEMBER', pending_key(parent), member(child)) == 1 then return end
    for _, id in ipairs(links(child).dependsOn or {}) do
      if id == parent.id then return end
    end
    if not families.list(parent, 'dependsOn', child.id) then return end
    if parent.h.state ~= 'waiting-children' then families.block(parent) end
    families.wait_for(parent, child)
  end

  function families.children_of(parent)
    local found = {}
    for _, id in ipairs(links(parent).childrenIds or {}) do
      local child = find(queue_at(homes(parent)[id] or parent.queue.p), id)
      if child then found[#found + 1] = child end
    end
    return found
  end

  function families.cut_tie(parent, child)
    local ties = own_links(parent)
    local known = remove_value(ties.childrenIds, child.id)
    known = remove_value(ties.dependsOn, child.id) or known
    parent.listed = nil
    drop_dependency(parent, member(child))
    return known
  end
end
