/** FlowProducer: trees, chains and fan-in, what a parent can read of its children, and the failure policies. */
import { FlowProducer, UnrecoverableError } from 'bunqueue/client';
import type { JobOptions } from 'bunqueue/client';
import {
  buryNext, check, closing, completeNext, connection, eventually, finish, handWorker, holds, never, openQueue,
  openWorker, queueName, refused, same, take,
} from './check';

function openFlows(): FlowProducer {
  return closing(new FlowProducer({ embedded: false, connection }));
}

/** A parent in one queue with a single child in another; the child fails for good under `policy`. */
async function failedChild(policy: JobOptions) {
  const [parentQueue, childQueue] = [queueName('parent'), queueName('child')];
  const [parents, children] = [openQueue(parentQueue), openQueue(childQueue)];
  const tree = await openFlows().add({
    name: 'parent', queueName: parentQueue, data: {},
    children: [{ name: 'child', queueName: childQueue, data: {}, opts: policy }],
  });
  const child = await buryNext(children, handWorker(childQueue), 'child broke');
  return { parents, parentQueue, childQueue, parent: tree.job.id, child };
}

await check('add stores a tree whose parent waits for its children', async () => {
  const [top, low] = [queueName('top'), queueName('low')];
  const [tops, lows] = [openQueue(top), openQueue(low)];
  const tree = await openFlows().add({
    name: 'report', queueName: top, data: { month: 5 },
    children: [
      { name: 'fetch', queueName: low, data: { part: 1 } },
      { name: 'fetch', queueName: low, data: { part: 2 } },
    ],
  });
  same([tree.job.name, tree.job.data, tree.job.queueName], ['report', { month: 5 }, top], 'root of the answer');
  same(tree.children!.map((node) => node.job.data), [{ part: 1 }, { part: 2 }], 'children of the answer');
  same(await tree.job.getState(), 'waiting-children', 'parent');
  same([await lows.getWaitingCount(), await tops.getWaitingCount()], [2, 0], 'waiting');
  same(await tops.getWaitingChildrenCount(), 1, 'waiting-children');
  const dependencies = await tops.getJobDependencies(tree.job.id);
  same(dependencies.unprocessed.sort(), tree.children!.map((node) => `${low}:${node.job.id}`).sort(), 'unprocessed');
});

await check('a parent runs after its children and reads their results', async () => {
  const [top, low] = [queueName('top'), queueName('low')];
  const order: string[] = [];
  openWorker(low, async (job) => {
    order.push(job.name);
    return { part: (job.data as { part: number }).part };
  });
  let values: Record<string, unknown> = {};
  openWorker(top, async (job) => {
    order.push(job.name);
    values = await job.getChildrenValues();
    return 'assembled';
  });
  const queue = openQueue(top);
  const tree = await openFlows().add({
    name: 'assemble', queueName: top, data: {},
    children: [1, 2, 3].map((part) => ({ name: 'part', queueName: low, data: { part } })),
  });
  await eventually(async () => (await queue.getJobState(tree.job.id)) === 'completed', 'parent completed');
  same(order, ['part', 'part', 'part', 'assemble'], 'order');
  const expected = Object.fromEntries(tree.children!.map((node, index) => [`${low}:${node.job.id}`, { part: index + 1 }]));
  same(values, expected, 'children values in the processor');
  same(await queue.getChildrenValues(tree.job.id), expected, 'children values of the queue');
  same((await queue.getJobDependenciesCount(tree.job.id)), { processed: 3, unprocessed: 0 }, 'dependencies');
});

await check('getFlow rebuilds three levels, and as deep as asked', async () => {
  const name = queueName('levels');
  const flows = openFlows();
  const leaf = (label: string) => ({ name: label, queueName: name, data: { label } });
  const tree = await flows.add({ ...leaf('root'), children: [{ ...leaf('middle'), children: [leaf('leaf')] }, leaf('side')] });
  const full = (await flows.getFlow({ id: tree.job.id, queueName: name }))!;
  same(full.children!.map((node) => node.job.name), ['middle', 'side'], 'second level');
  same(full.children![0]!.children!.map((node) => node.job.data), [{ label: 'leaf' }], 'third level');
  same(full.children![0]!.job.parent?.id ?? full.children![0]!.job.opts.parent?.id, tree.job.id, 'link to the parent');
  const shallow = (await flows.getFlow({ id: tree.job.id, queueName: name, depth: 1 }))!;
  same(shallow.children![0]!.children, undefined, 'depth one');
  same(await flows.getFlow({ id: 'no-such-job', queueName: name }), null, 'unknown root');
});

await check('options of nodes and of queues reach the jobs', async () => {
  const name = queueName('options');
  const queue = openQueue(name);
  const tree = await openFlows().add(
    {
      name: 'parent', queueName: name, data: {}, opts: { jobId: `${name}-parent` },
      children: [{ name: 'child', queueName: name, data: {}, opts: { attempts: 7, delay: 60_000 } }],
    },
    { queuesOptions: { [name]: { attempts: 2, backoff: 77 } } },
  );
  same(tree.job.id, `${name}-parent`, 'id of the parent');
  const [parent, child] = [await queue.getJob(tree.job.id), await queue.getJob(tree.children![0]!.job.id)];
  same([parent!.opts.attempts, child!.opts.attempts, child!.opts.backoff], [2, 7, 77], 'attempts and backoff');
  same(await child!.getState(), 'delayed', 'delayed child');
});

await check('addBulk stores several trees in one go', async () => {
  const name = queueName('bulk');
  const queue = openQueue(name);
  const trees = await openFlows().addBulk(
    ['one', 'two'].map((label) => ({
      name: label, queueName: name, data: {}, children: [{ name: `${label}-child`, queueName: name, data: {} }],
    })),
  );
  same(trees.map((tree) => tree.job.name), ['one', 'two'], 'roots');
  same([await queue.getWaitingCount(), await queue.getWaitingChildrenCount()], [2, 2], 'counts');
});

await check('a flow is stored whole or not at all', async () => {
  const name = queueName('atomic');
  const queue = openQueue(name);
  const broken = {
    name: 'parent', queueName: name, data: {},
    children: [
      { name: 'good', queueName: name, data: {} },
      { name: 'bad', queueName: name, data: {}, opts: { attempts: 0 } },
    ],
  };
  await refused(openFlows().add(broken), /ttempts must be (at least 1|between 1 and 1000)/, 'flow with a bad child');
  same(await queue.countAsync(), 0, 'jobs');
});

await check('addChain runs its steps one after the other', async () => {
  const name = queueName('chain');
  const queue = openQueue(name);
  const flows = openFlows();
  const steps = ['first', 'second', 'third'].map((step) => ({ name: step, queueName: name, data: { step } }));
  const { jobIds } = await flows.addChain(steps);
  same([jobIds.length, await queue.getWaitingCount(), await queue.getWaitingChildrenCount()], [3, 1, 2], 'stored');
  const order: string[] = [];
  openWorker(name, async (job) => {
    order.push(job.name);
    return `${job.name} done`;
  }, { concurrency: 3 });
  await eventually(async () => (await queue.getCompletedCount()) === 3, 'all completed');
  same(order, ['first', 'second', 'third'], 'order');
  same(await flows.getParentResult(jobIds[0]!), 'first done', 'getParentResult');
  const results = await flows.getParentResults(jobIds);
  same([...results.values()], ['first done', 'second done', 'third done'], 'getParentResults');
});

await check('addBulkThen runs the last step after the parallel ones', async () => {
  const name = queueName('fan-in');
  const queue = openQueue(name);
  const step = (label: string) => ({ name: label, queueName: name, data: {} });
  const { parallelIds, finalId } = await openFlows().addBulkThen([step('a'), step('b')], step('merge'));
  same([parallelIds.length, await queue.getJobState(finalId)], [2, 'waiting-children'], 'stored');
  const worker = handWorker(name);
  same([await completeNext(queue, worker, 1), await completeNext(queue, worker, 2)].sort(), [...parallelIds].sort(), 'first the parallel ones');
  same(String((await take(worker)).id), finalId, 'then the last');
});

await check('addTree runs parents before their children', async () => {
  const name = queueName('tree');
  const queue = openQueue(name);
  const step = (label: string) => ({ name: label, queueName: name, data: {} });
  const { jobIds } = await openFlows().addTree({ ...step('root'), children: [step('left'), step('right')] });
  same([jobIds.length, await queue.getWaitingCount()], [3, 1], 'only the root is ready');
  const worker = handWorker(name);
  same((await queue.getJob(await completeNext(queue, worker)))!.name, 'root', 'first');
  same(await queue.getWaitingCount(), 2, 'both children are ready');
});

await check('without a policy a failed child keeps its parent blocked', async () => {
  const { parents, parent } = await failedChild({});
  await never(async () => (await parents.getJobState(parent)) !== 'waiting-children', 'the parent moved', 150);
});

await check('failParentOnFailure fails the parent', async () => {
  const { parents, parent, child } = await failedChild({ failParentOnFailure: true });
  await eventually(async () => (await parents.getJobState(parent)) === 'failed', 'parent failed');
  const [entry] = await parents.getDlqAsync();
  same([entry!.job.id, entry!.error], [parent, `Child job ${child} failed: child broke`], 'dead letter');
});

await check('continueParentOnFailure releases the parent and tells it why', async () => {
  const { parents, parentQueue, childQueue, parent, child } = await failedChild({ continueParentOnFailure: true });
  await eventually(async () => (await parents.getJobState(parent)) === 'waiting', 'parent released');
  let failed: Record<string, string> = {};
  openWorker(parentQueue, async (job) => void (failed = await job.getFailedChildrenValues()));
  await eventually(async () => (await parents.getJobState(parent)) === 'completed', 'parent completed');
  same(failed, { [`${childQueue}:${child}`]: 'child broke' }, 'failed children');
});

await check('ignoreDependencyOnFailure releases the parent and keeps the failure apart', async () => {
  const { parents, childQueue, parent, child } = await failedChild({ ignoreDependencyOnFailure: true });
  await eventually(async () => (await parents.getJobState(parent)) === 'waiting', 'parent released');
  const job = (await parents.getJob(parent))!;
  same(await job.getIgnoredChildrenFailures(), { [`${childQueue}:${child}`]: 'child broke' }, 'ignored failures');
  same(await job.getFailedChildrenValues(), {}, 'failed children');
});

await check('removeDependencyOnFailure releases the parent silently', async () => {
  const { parents, parent } = await failedChild({ removeDependencyOnFailure: true });
  await eventually(async () => (await parents.getJobState(parent)) === 'waiting', 'parent released');
  const job = (await parents.getJob(parent))!;
  same([await job.getIgnoredChildrenFailures(), await job.getFailedChildrenValues()], [{}, {}], 'failures');
});

await check('a failed attempt that is retried leaves the parent alone', async () => {
  const name = queueName('retried-child');
  const queue = openQueue(name);
  let runs = 0;
  openWorker(name, async (job) => {
    if (job.name === 'child' && ++runs === 1) throw new Error('once');
    if (job.name === 'never') throw new UnrecoverableError('unexpected');
  });
  const tree = await openFlows().add({
    name: 'parent', queueName: name, data: {},
    children: [{ name: 'child', queueName: name, data: {}, opts: { attempts: 3, backoff: 10, failParentOnFailure: true } }],
  });
  await eventually(async () => (await queue.getJobState(tree.job.id)) === 'completed', 'parent completed');
  same(runs, 2, 'runs of the child');
});

await check('removeChildDependency frees the parent of one child', async () => {
  const name = queueName('unlink');
  const queue = openQueue(name);
  const tree = await openFlows().add({
    name: 'parent', queueName: name, data: {}, children: [{ name: 'child', queueName: name, data: {} }],
  });
  const child = (await queue.getJob(tree.children![0]!.job.id))!;
  same(await child.removeChildDependency(), true, 'removed');
  await eventually(async () => (await queue.getJobState(tree.job.id)) === 'waiting', 'parent is ready');
  same(await child.getState(), 'waiting', 'the child lives on');
});

await check('removeUnprocessedChildren removes what has not run', async () => {
  const name = queueName('prune');
  const queue = openQueue(name);
  const tree = await openFlows().add({
    name: 'parent', queueName: name, data: {},
    children: [{ name: 'one', queueName: name, data: {} }, { name: 'two', queueName: name, data: {} }],
  });
  await completeNext(queue, handWorker(name), 'kept');
  await (await queue.getJob(tree.job.id))!.removeUnprocessedChildren();
  const states = await Promise.all(tree.children!.map((node) => queue.getJobState(node.job.id)));
  same(states.sort(), ['completed', 'unknown'], 'the finished child stays, the other is gone');
});

await check('a job added with a parent is linked to it, and the parent waits for it', async () => {
  const name = queueName('late-child');
  const queue = openQueue(name);
  const parent = await queue.add('parent', {});
  const child = await queue.add('child', { own: 1 }, { parent: { id: parent.id, queue: name } });
  const stored = (await queue.getJob(child.id))!;
  same(stored.opts.parent, { id: parent.id, queue: name }, 'parent of the child');
  holds((stored.data as { own: number }).own === 1, 'own data');
  same(await parent.getState(), 'waiting-children', 'parent');
  same(await completeNext(queue, handWorker(name), 'done'), child.id, 'the child runs first');
  same(await parent.getState(), 'waiting', 'parent behind it');
  same(await parent.getChildrenValues(), { [`${name}:${child.id}`]: 'done' }, 'what it finds');
});

await check('an active job can go back to wait for children', async () => {
  const name = queueName('wait-children');
  const queue = openQueue(name);
  const job = await queue.add('parent', {});
  const held = await take(handWorker(name));
  same(await queue.moveJobToWaitingChildren(job.id, held.token), true, 'moved');
  same(await job.getState(), 'waiting-children', 'state');
});

finish();
