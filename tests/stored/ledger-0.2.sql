BEGIN TRANSACTION;
CREATE TABLE nearveil_account (
	name TEXT NOT NULL, 
	opening TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	head TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "nearveil_account" VALUES('pure','{"owner":"ann","protects":"query","relation":"replace","unit":"image"}','{"epsilon":2.0,"kind":"pure","limits":[2000000000000000000]}','[500000000000000000]',3,'029c73e06f2ca1efeb1ef7ab0a7a812115a40cb88bc6cbd572b8649abadbc72e');
CREATE TABLE nearveil_entry (
	account TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	time TEXT NOT NULL, 
	"key" TEXT, 
	client TEXT, 
	nonce TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	state TEXT NOT NULL, 
	client_state TEXT, 
	hash TEXT NOT NULL, 
	slot TEXT, 
	PRIMARY KEY (account, sequence), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name), 
	UNIQUE (slot)
);
INSERT INTO "nearveil_entry" VALUES('pure',1,'opened','2026-11-18T19:59:54.758599+00:00',NULL,NULL,'922d8004462a5a66fb19c0ae54f09f39','{"cost":null,"opening":"{\"owner\":\"ann\",\"protects\":\"query\",\"relation\":\"replace\",\"unit\":\"image\"}","terms":"{\"epsilon\":2.0,\"kind\":\"pure\",\"limits\":[2000000000000000000]}"}','f0e005730ad232a82291ca2c6e8a9208d3e783bc8f2aaa174a52e9214c44b230',NULL,'d71305b7b6b47a2e9560810ac376497aa5e41869d3e5b99b694e0f9dc064de43',NULL);
INSERT INTO "nearveil_entry" VALUES('pure',2,'debit','2026-11-18T19:59:54.764000+00:00','first',NULL,'1c437cd48accfb7f8d02580193bd7c79','{"charge":[["{\"epsilon\":0.5,\"type\":\"PureDp\"}",1]],"price":[500000000000000000]}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'7d0edc1225b6a8a452745f1f6c9a9e89c43d21a2b10556ac3b7cb4787b2a8e3d','a84e382c8957da1155467f82a39bcad1ff7850c80fd60b48c39e11f3b4192511');
INSERT INTO "nearveil_entry" VALUES('pure',3,'message','2026-11-18T19:59:54.766432+00:00','first',NULL,'1c437cd48accfb7f8d02580193bd7c79','{"message":"a2VwdA=="}','74111ee64cc8f705f4d279ff012b2bdd88197e6f09dedeb7773e3e318e953896',NULL,'029c73e06f2ca1efeb1ef7ab0a7a812115a40cb88bc6cbd572b8649abadbc72e','7b7312feb7b0f0edaf5b2fece0a405aa65755d25be0e5f1dff3a25a53b184dbe');
CREATE TABLE nearveil_ledger (
	identity TEXT NOT NULL, 
	PRIMARY KEY (identity)
);
INSERT INTO "nearveil_ledger" VALUES('48d563773548e6c10ecfc695713bd24c');
CREATE TABLE nearveil_ledger_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT nearveil_ledger_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "nearveil_ledger_version" VALUES('0002');
CREATE TABLE nearveil_quota (
	account TEXT NOT NULL, 
	client TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	PRIMARY KEY (account, client), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name)
);
COMMIT;
