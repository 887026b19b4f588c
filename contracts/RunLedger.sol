// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";

/// Anchors the logs of training runs, holds stakes, and pays contributors (docs/settlement.md).
///
/// A run's id is `keccak256(abi.encode(owner, log))`. So nobody else can register a run under it,
/// and whoever signs or stakes for an id has named its owner.
///
/// The contract makes one external call, in `withdraw`, after all changes of state. All other
/// functions only credit `balanceOf`. It never reads its own balance.
contract RunLedger is EIP712 {
    struct Run {
        address owner;
        uint64 window;
        uint32 quorum;
        bytes32 manifest;
        bytes32 auditorsRoot;
        uint256 minStake;
        /// Wei that claims are paid from.
        uint256 pool;
        /// The newest anchored head: root of the log's first `size` statements (RFC 6962).
        bytes32 root;
        uint64 size;
        uint64 round;
        uint64 closedAt;
        bool forked;
        /// Claims root that has passed its window.
        bytes32 accepted;
        /// Claims root whose window may be running; zero: none.
        bytes32 pending;
        uint64 pendingSince;
        uint64 settlements;
    }

    struct Stake {
        uint192 amount;
        /// Time of `leaveRun`; zero: the stake stays.
        uint64 leavingAt;
    }

    /// An auditor's signature, with the proof that `auditorsRoot` covers the auditor's address.
    struct Vote {
        bytes signature;
        bytes32[] proof;
    }

    bytes32 public constant COMMIT = keccak256("Commit(bytes32 run,uint64 round,bytes32 root)");
    bytes32 public constant HEAD = keccak256("Head(bytes32 run,uint64 size,bytes32 root)");
    bytes32 public constant VETO =
        keccak256("Veto(bytes32 run,uint64 settlement,bytes32 claimsRoot)");
    bytes32 public constant MISMATCH =
        keccak256(
            "Mismatch(bytes32 run,address site,uint64 round,bytes32 evidence,address challenger)"
        );
    uint64 public constant LONGEST_WINDOW = 365 days;

    mapping(bytes32 run => Run) private runs;
    mapping(bytes32 run => mapping(address who => Stake)) public stakes;
    /// Wei that an account has claimed of a run so far.
    mapping(bytes32 run => mapping(address who => uint256)) public claimed;
    /// Wei that an account may withdraw.
    mapping(address who => uint256) public balanceOf;
    /// Offences that were punished; each is punished once.
    mapping(bytes32 offence => bool) public punished;

    event Registered(
        bytes32 indexed run,
        address indexed owner,
        bytes32 indexed log,
        bytes32 manifest
    );
    event Funded(bytes32 indexed run, address indexed by, uint256 amount);
    event Staked(bytes32 indexed run, address indexed who, uint256 amount);
    event Leaving(bytes32 indexed run, address indexed who, uint256 withdrawableAt);
    event StakeReturned(bytes32 indexed run, address indexed who, uint256 amount);
    event Anchored(bytes32 indexed run, uint64 round, uint64 size, bytes32 root);
    event Settled(bytes32 indexed run, uint64 settlement, uint64 size, bytes32 claimsRoot);
    event Vetoed(bytes32 indexed run, uint64 settlement, bytes32 claimsRoot);
    event Claimed(bytes32 indexed run, address indexed who, uint256 amount, uint256 cumulative);
    event Withdrawn(address indexed who, uint256 amount);
    event Slashed(
        bytes32 indexed run,
        address indexed who,
        address indexed challenger,
        uint256 amount,
        bytes32 offence
    );
    event Forked(bytes32 indexed run, uint64 size);
    event Closing(bytes32 indexed run, uint256 reclaimableAt);
    event Reclaimed(bytes32 indexed run, uint256 amount);

    error AlreadyPunished();
    error AlreadyRegistered();
    error BadParameters();
    error BadProof();
    error NotAuditor(address signer);
    error NotEquivocation();
    error NotNewer();
    error NotOwner();
    error NotStaked();
    error NothingToPay();
    error QuorumMissed();
    error RunEnded();
    error SettlementPending();
    error SettlementUnknown();
    error TooEarly();
    error TooLate();
    error UnknownRun();
    error PaymentFailed();

    constructor() EIP712("dilocox RunLedger", "1") {}

    modifier ownerOnly(bytes32 run) {
        if (runs[run].owner != msg.sender) revert NotOwner();
        _;
    }

    /// All that is kept about a run; all zero if it is not registered.
    function runOf(bytes32 run) external view returns (Run memory) {
        return runs[run];
    }

    // -- registration and pool -----------------------------------------------------------------

    /// Register a run; the sender is its owner, the payment its pool.
    /// @param log Id of the run's log: SHA-256 of its first statement.
    /// @param manifest SHA-256 of the agreed run file.
    /// @param window Seconds in which auditors may veto a settlement; a stake is bound for two.
    /// @param auditorsRoot Merkle root of the auditors, over double hashes of their addresses.
    /// @param quorum Auditors that must agree.
    function register(
        bytes32 log,
        bytes32 manifest,
        uint64 window,
        uint256 minStake,
        bytes32 auditorsRoot,
        uint32 quorum
    ) external payable returns (bytes32 run) {
        if (window == 0 || window > LONGEST_WINDOW || minStake == 0 || quorum == 0) {
            revert BadParameters();
        }
        run = keccak256(abi.encode(msg.sender, log));
        Run storage r = runs[run];
        if (r.owner != address(0)) revert AlreadyRegistered();
        r.owner = msg.sender;
        r.window = window;
        r.quorum = quorum;
        r.manifest = manifest;
        r.auditorsRoot = auditorsRoot;
        r.minStake = minStake;
        r.pool = msg.value;
        emit Registered(run, msg.sender, log, manifest);
        emit Funded(run, msg.sender, msg.value);
    }

    /// Add to a run's pool.
    function fund(bytes32 run) external payable {
        Run storage r = _open(run);
        r.pool += msg.value;
        emit Funded(run, msg.sender, msg.value);
    }

    /// Announce the end of a run. After four windows `reclaim` returns what is left of the pool.
    function close(bytes32 run) external ownerOnly(run) {
        Run storage r = _open(run);
        r.closedAt = uint64(block.timestamp);
        emit Closing(run, block.timestamp + 4 * uint256(r.window));
    }

    /// Credit the owner with what is left of a closed run's pool. The pool of an owner that has
    /// forked its log stays: only claims are paid from it.
    function reclaim(bytes32 run) external ownerOnly(run) {
        Run storage r = runs[run];
        if (r.forked) revert RunEnded();
        if (r.closedAt == 0 || block.timestamp < uint256(r.closedAt) + 4 * uint256(r.window)) {
            revert TooEarly();
        }
        uint256 amount = r.pool;
        if (amount == 0) revert NothingToPay();
        r.pool = 0;
        balanceOf[msg.sender] += amount;
        emit Reclaimed(run, amount);
    }

    // -- stakes --------------------------------------------------------------------------------

    /// Add to the sender's stake, which must then be at least the run's least. Ends a `leaveRun`.
    function stake(bytes32 run) external payable {
        Run storage r = _open(run);
        Stake storage s = stakes[run][msg.sender];
        uint256 amount = s.amount + msg.value;
        if (amount < r.minStake || amount > type(uint192).max) revert BadParameters();
        s.amount = uint192(amount);
        s.leavingAt = 0;
        emit Staked(run, msg.sender, amount);
    }

    /// Announce that the sender leaves. The stake stays at risk for two windows.
    function leaveRun(bytes32 run) external {
        Stake storage s = stakes[run][msg.sender];
        if (s.amount == 0 || s.leavingAt != 0) revert NotStaked();
        s.leavingAt = uint64(block.timestamp);
        emit Leaving(run, msg.sender, block.timestamp + 2 * uint256(runs[run].window));
    }

    /// Credit the sender with its stake, two windows after `leaveRun`.
    function withdrawStake(bytes32 run) external {
        Stake storage s = stakes[run][msg.sender];
        uint256 amount = s.amount;
        if (amount == 0) revert NotStaked();
        if (
            s.leavingAt == 0 ||
            block.timestamp < uint256(s.leavingAt) + 2 * uint256(runs[run].window)
        ) revert TooEarly();
        delete stakes[run][msg.sender];
        balanceOf[msg.sender] += amount;
        emit StakeReturned(run, msg.sender, amount);
    }

    /// True if `who` has the least stake, has not announced to leave, and the run goes on.
    function isStaked(bytes32 run, address who) public view returns (bool) {
        Run storage r = runs[run];
        Stake storage s = stakes[run][who];
        return
            r.owner != address(0) &&
            r.closedAt == 0 &&
            !r.forked &&
            s.leavingAt == 0 &&
            s.amount >= r.minStake;
    }

    // -- anchors -------------------------------------------------------------------------------

    /// Anchor a head of the log. The owner must be staked.
    /// @param size Statements of the log; more than at the last anchor.
    /// @param root RFC 6962 root over them.
    /// @param proof RFC 6962 consistency proof from the last anchored head; empty for the first.
    function anchor(
        bytes32 run,
        uint64 round,
        uint64 size,
        bytes32 root,
        bytes32[] calldata proof
    ) external ownerOnly(run) {
        Run storage r = runs[run];
        if (r.forked) revert RunEnded();
        Stake storage s = stakes[run][msg.sender];
        if (s.leavingAt != 0 || s.amount < r.minStake) revert NotStaked();
        uint64 earlier = r.size;
        if (size <= earlier) revert NotNewer();
        if (earlier == 0 ? proof.length != 0 : !isConsistent(earlier, r.root, size, root, proof)) {
            revert BadProof();
        }
        r.root = root;
        r.size = size;
        r.round = round;
        emit Anchored(run, round, size, root);
    }

    /// True if `proof` shows that the log of `size` statements continues the log of `earlier`
    /// (RFC 9162, section 2.1.4.2).
    function isConsistent(
        uint64 earlier,
        bytes32 earlierRoot,
        uint64 size,
        bytes32 root,
        bytes32[] calldata proof
    ) public pure returns (bool) {
        if (earlier == 0 || earlier > size) return false;
        if (earlier == size) return proof.length == 0 && earlierRoot == root;
        // A perfect tree of `earlier` leaves is itself the first part of the proof.
        bool perfect = earlier & (earlier - 1) == 0;
        if (!perfect && proof.length == 0) return false;
        uint64 number = earlier - 1;
        uint64 last = size - 1;
        while (number & 1 == 1) {
            number >>= 1;
            last >>= 1;
        }
        bytes32 older = perfect ? earlierRoot : proof[0];
        bytes32 newer = older;
        for (uint256 i = perfect ? 0 : 1; i < proof.length; ++i) {
            if (last == 0) return false;
            bytes32 part = proof[i];
            if (number & 1 == 1 || number == last) {
                older = _node(part, older);
                newer = _node(part, newer);
                while (number & 1 == 0 && number != 0) {
                    number >>= 1;
                    last >>= 1;
                }
            } else {
                newer = _node(newer, part);
            }
            number >>= 1;
            last >>= 1;
        }
        return last == 0 && older == earlierRoot && newer == root;
    }

    // -- settlement ----------------------------------------------------------------------------

    /// Propose amounts up to the newest anchored head.
    /// @param size That head's size. Another one reverts: the amounts are those of a log's prefix.
    /// @param claimsRoot Merkle root over the leaves of `claimLeaf`, with cumulative amounts.
    function settle(bytes32 run, uint64 size, bytes32 claimsRoot) external ownerOnly(run) {
        Run storage r = runs[run];
        if (r.forked) revert RunEnded();
        // So every settlement can be claimed for two windows before `reclaim`.
        if (r.closedAt != 0 && block.timestamp > uint256(r.closedAt) + r.window) revert TooLate();
        if (size == 0 || size != r.size) revert NotNewer();
        if (claimsRoot == 0) revert BadParameters();
        _accept(r);
        if (r.pending != 0) revert SettlementPending();
        r.pending = claimsRoot;
        r.pendingSince = uint64(block.timestamp);
        r.settlements += 1;
        emit Settled(run, r.settlements, size, claimsRoot);
    }

    /// Reject the pending settlement, inside its window, by a quorum of auditors.
    function veto(bytes32 run, uint64 settlement, Vote[] calldata votes) external {
        Run storage r = runs[run];
        bytes32 pending = r.pending;
        if (pending == 0 || settlement != r.settlements) revert SettlementUnknown();
        if (block.timestamp >= uint256(r.pendingSince) + r.window) revert TooLate();
        _checkQuorum(r, keccak256(abi.encode(VETO, run, settlement, pending)), votes);
        r.pending = 0;
        emit Vetoed(run, settlement, pending);
    }

    /// Leaf of an account in a claims root. `cumulative`: wei since the run began.
    function claimLeaf(
        bytes32 run,
        address who,
        uint256 cumulative
    ) public pure returns (bytes32) {
        return keccak256(bytes.concat(keccak256(abi.encode(run, who, cumulative))));
    }

    /// Credit `who` with what the accepted settlement owes it, as far as the pool reaches. Anyone
    /// may call it. The rest can be claimed when the pool is funded.
    function claim(
        bytes32 run,
        address who,
        uint256 cumulative,
        bytes32[] calldata proof
    ) external returns (uint256 amount) {
        Run storage r = runs[run];
        _accept(r);
        bytes32 accepted = r.accepted;
        if (accepted == 0) revert SettlementUnknown();
        if (!MerkleProof.verifyCalldata(proof, accepted, claimLeaf(run, who, cumulative))) {
            revert BadProof();
        }
        uint256 before = claimed[run][who];
        if (cumulative <= before) revert NothingToPay();
        amount = cumulative - before;
        uint256 pool = r.pool;
        if (amount > pool) amount = pool;
        if (amount == 0) revert NothingToPay();
        claimed[run][who] = before + amount;
        r.pool = pool - amount;
        balanceOf[who] += amount;
        emit Claimed(run, who, amount, before + amount);
    }

    /// Pay the sender all that it was credited with.
    function withdraw() external {
        uint256 amount = balanceOf[msg.sender];
        if (amount == 0) revert NothingToPay();
        balanceOf[msg.sender] = 0;
        emit Withdrawn(msg.sender, amount);
        (bool paid, ) = msg.sender.call{value: amount}("");
        if (!paid) revert PaymentFailed();
    }

    // -- slashing ------------------------------------------------------------------------------

    /// Slash the account that has signed two roots of one round.
    function slashEquivocated(
        bytes32 run,
        uint64 round,
        bytes32 root,
        bytes calldata signature,
        bytes32 otherRoot,
        bytes calldata otherSignature
    ) external {
        if (root == otherRoot) revert NotEquivocation();
        address who = _signer(keccak256(abi.encode(COMMIT, run, round, root)), signature);
        bytes32 other = keccak256(abi.encode(COMMIT, run, round, otherRoot));
        if (_signer(other, otherSignature) != who) revert NotEquivocation();
        _slash(run, who, msg.sender, keccak256(abi.encode(COMMIT, run, who, round)));
    }

    /// Slash the owner that has signed two heads of one size. The run ends: nothing more is
    /// anchored or settled, and its pool is not reclaimed.
    function slashForked(
        bytes32 run,
        uint64 size,
        bytes32 root,
        bytes calldata signature,
        bytes32 otherRoot,
        bytes calldata otherSignature
    ) external {
        Run storage r = runs[run];
        address owner = r.owner;
        if (owner == address(0)) revert UnknownRun();
        if (root == otherRoot) revert NotEquivocation();
        bytes32 head = keccak256(abi.encode(HEAD, run, size, root));
        bytes32 other = keccak256(abi.encode(HEAD, run, size, otherRoot));
        if (_signer(head, signature) != owner || _signer(other, otherSignature) != owner) {
            revert NotEquivocation();
        }
        if (r.forked) revert AlreadyPunished();
        r.forked = true;
        emit Forked(run, size);
        // An owner that has withdrawn its stake ends the run all the same.
        if (stakes[run][owner].amount != 0) {
            _slash(run, owner, msg.sender, keccak256(abi.encode(HEAD, run, owner, size)));
        }
    }

    /// Slash a site whose work in a round a quorum of auditors found not to be what it signed.
    /// @param evidence SHA-256 of the verdicts.
    /// @param challenger Who gets the tenth. The auditors sign it, so that no copy of the
    /// transaction can take it.
    function slashMismatch(
        bytes32 run,
        address site,
        uint64 round,
        bytes32 evidence,
        address challenger,
        Vote[] calldata votes
    ) external {
        Run storage r = runs[run];
        if (r.owner == address(0)) revert UnknownRun();
        _checkQuorum(
            r,
            keccak256(abi.encode(MISMATCH, run, site, round, evidence, challenger)),
            votes
        );
        _slash(run, site, challenger, keccak256(abi.encode(MISMATCH, run, site, round)));
    }

    // -- inside --------------------------------------------------------------------------------

    function _open(bytes32 run) private view returns (Run storage r) {
        r = runs[run];
        if (r.owner == address(0)) revert UnknownRun();
        if (r.closedAt != 0 || r.forked) revert RunEnded();
    }

    /// Accept the pending settlement if its window has passed without a veto.
    function _accept(Run storage r) private {
        bytes32 pending = r.pending;
        if (pending != 0 && block.timestamp >= uint256(r.pendingSince) + r.window) {
            r.accepted = pending;
            r.pending = 0;
        }
    }

    function _slash(bytes32 run, address who, address challenger, bytes32 offence) private {
        if (punished[offence]) revert AlreadyPunished();
        uint256 amount = stakes[run][who].amount;
        if (amount == 0) revert NotStaked();
        punished[offence] = true;
        delete stakes[run][who];
        uint256 tenth = amount / 10;
        balanceOf[challenger] += tenth;
        runs[run].pool += amount - tenth;
        emit Slashed(run, who, challenger, amount, offence);
    }

    /// Signers must come in ascending order of their addresses, so none counts twice.
    function _checkQuorum(Run storage r, bytes32 message, Vote[] calldata votes) private view {
        if (votes.length < r.quorum) revert QuorumMissed();
        bytes32 root = r.auditorsRoot;
        address previous = address(0);
        for (uint256 i = 0; i < votes.length; ++i) {
            address signer = _signer(message, votes[i].signature);
            bytes32 leaf = keccak256(bytes.concat(keccak256(abi.encode(signer))));
            if (signer <= previous || !MerkleProof.verifyCalldata(votes[i].proof, root, leaf)) {
                revert NotAuditor(signer);
            }
            previous = signer;
        }
    }

    function _signer(bytes32 message, bytes calldata signature) private view returns (address) {
        return ECDSA.recover(_hashTypedDataV4(message), signature);
    }

    /// Inner node of an RFC 6962 tree.
    function _node(bytes32 left, bytes32 right) private pure returns (bytes32) {
        return sha256(bytes.concat(bytes1(0x01), left, right));
    }
}
